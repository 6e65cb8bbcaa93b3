// All kernels, for the instruction set ISA, whose vectors have VECTOR_BYTES: included once for each.
//
// A header with kernels takes effect once per pass, at its first inclusion: until then its guard and NATIVE_PASS are
// both defined or both undefined, and the next pass begins with the other state. A header alone, as in an editor, is
// for the baseline.

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
