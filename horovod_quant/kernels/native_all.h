// All kernels, for the instruction set ISA, whose vectors have VECTOR_BYTES: included once for each.
//
// Every header with kernels takes effect once a pass, where it is needed first: its guard and NATIVE_PASS are both
// defined or both undefined until then, and the next pass begins with the other of the two. A header that is opened by
// itself, as in an editor, is the baseline's.

#include "native_each.h"
#include "native_elias.h"
#include "native_rotated_sum.h"

#ifdef NATIVE_PASS
#undef NATIVE_PASS
#else
#define NATIVE_PASS
#endif
#undef VECTOR_BYTES
#undef ISA
