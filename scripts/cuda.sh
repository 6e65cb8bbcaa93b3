# shellcheck shell=bash
# Find CUDA's toolkit and NCCL, and say what is missing. Sourced by scripts/setup.

USUAL_CUDA=/usr/local/cuda          # where NVIDIA's installers put the toolkit
USUAL_NCCL_INCLUDE=/usr/include     # where the system's packages put the header

# find_cuda: set CUDA_HOME to a toolkit that Horovod can be built with: the one it names, or that of the nvcc on PATH,
# or the usual one.
find_cuda() {
    local nvcc folder missing=""
    if [ -n "${CUDA_HOME:-}" ]; then
        missing=$(missing_in_cuda "$CUDA_HOME")
        [ -z "$missing" ] ||
            die "CUDA_HOME=$CUDA_HOME has no $missing; set it to the folder of a whole CUDA toolkit, or unset it"
        return
    fi
    # The nvcc on PATH may be a link into the toolkit. Where it is a script that calls another one, the usual place
    # is left.
    nvcc=$(command -v nvcc || true)
    [ -z "$nvcc" ] || nvcc=$(readlink -f "$nvcc")
    for folder in ${nvcc:+"${nvcc%/bin/nvcc}"} "$USUAL_CUDA"; do
        if [ -z "$(missing_in_cuda "$folder")" ]; then
            CUDA_HOME=$folder
            return
        fi
    done
    [ -z "$nvcc" ] ||
        die "$nvcc is there, but not the rest of CUDA's toolkit; set CUDA_HOME to the folder that has both bin/nvcc and" \
            "include/cuda_runtime.h"
    die "nvcc is missing, CUDA's compiler, without which Horovod cannot be built for a GPU: neither is it on PATH nor in" \
        "$USUAL_CUDA; install CUDA's toolkit, or set CUDA_HOME to its folder"
}

# missing_in_cuda FOLDER: the first file that a toolkit there lacks.
missing_in_cuda() {
    if [ ! -x "$1/bin/nvcc" ]; then
        echo bin/nvcc
    elif [ ! -e "$1/include/cuda_runtime.h" ]; then
        echo include/cuda_runtime.h
    fi
}

# check_cuda_version VERSION: stop unless the toolkit has the same major version, which PyTorch is built with. Nothing to
# check if that is not known yet.
check_cuda_version() {
    local wanted=$1 found
    found=$("$CUDA_HOME/bin/nvcc" --version 2> /dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p')
    [ -n "$found" ] || die "$CUDA_HOME/bin/nvcc does not run; set CUDA_HOME to the folder of another CUDA toolkit"
    [ -z "$wanted" ] || [ "${found%%.*}" = "${wanted%%.*}" ] ||
        die "$CUDA_HOME/bin/nvcc is of CUDA $found, but PyTorch $(torch_version) is built with CUDA $wanted; set CUDA_HOME" \
            "to a toolkit of CUDA ${wanted%%.*}, or TORCH to a PyTorch that is built with CUDA ${found%%.*}"
}

# torch_cuda: the version of CUDA that the installed PyTorch is built with; nothing if it is the CPU build.
torch_cuda() { sed -n "s/^cuda.*= '\(.*\)'$/\1/p" "$SITE/torch/version.py"; }

# check_own_nccl: stop if the user's NCCL is not where the user says.
check_own_nccl() {
    [ -n "${HOROVOD_NCCL_HOME:-}" ] || return 0
    [ -e "$HOROVOD_NCCL_HOME/include/nccl.h" ] ||
        die "HOROVOD_NCCL_HOME=$HOROVOD_NCCL_HOME has no include/nccl.h; set it to NCCL's folder, or unset it to take the" \
            "one that comes with PyTorch"
}

# find_nccl FOLDER: set HOROVOD_NCCL_INCLUDE and HOROVOD_NCCL_LIB, for Horovod's build: to the user's NCCL, or to the one
# that comes with PyTorch, or else to that of the system. The folder is for a link.
find_nccl() {
    local links=$1 wheel=$SITE/nvidia/nccl library
    if [ -n "${HOROVOD_NCCL_HOME:-}" ]; then
        check_own_nccl
        HOROVOD_NCCL_INCLUDE=$HOROVOD_NCCL_HOME/include HOROVOD_NCCL_LIB=$HOROVOD_NCCL_HOME/lib
    elif [ -e "$wheel/include/nccl.h" ] && [ -e "$wheel/lib/libnccl.so.2" ]; then
        # The wheel has the library under the name that programs load it by, but not under the one that they link to.
        mkdir -p "$links"
        ln -sf "$wheel/lib/libnccl.so.2" "$links/libnccl.so"
        HOROVOD_NCCL_INCLUDE=$wheel/include HOROVOD_NCCL_LIB=$links
    else
        # Users other than root may not have /sbin on PATH.
        library=$({ ldconfig -p || /sbin/ldconfig -p; } 2> /dev/null | sed -n 's/.*libnccl\.so .*=> //p' | head -n 1) ||
            library=""
        [ -n "$library" ] && [ -e "$USUAL_NCCL_INCLUDE/nccl.h" ] ||
            die "NCCL is missing: the wheel that comes with PyTorch's CUDA build (nvidia-nccl) is not in $wheel, and the" \
                "system has no $USUAL_NCCL_INCLUDE/nccl.h and libnccl.so (Debian: libnccl-dev); install it, set" \
                "HOROVOD_NCCL_HOME to its folder, or do without it: scripts/setup --gpu=host"
        HOROVOD_NCCL_INCLUDE=$USUAL_NCCL_INCLUDE HOROVOD_NCCL_LIB=${library%/*}
    fi
}

# gpu_key: what a Horovod for a GPU depends on besides; without CUDA's compiler here, a kept one still serves.
gpu_key() {
    for_gpu || return 0
    printf ' %s cuda %s tensorflow on the host %s' "$KIND" "$(torch_cuda)" "${HOROVOD_BUILD_CUDA_CC_LIST:-}"
    [ "$KIND" = host ] || printf ' nccl %s' "${HOROVOD_NCCL_HOME:-$(cd "$SITE" && echo nvidia_nccl*.dist-info)}"
}

# prepare_gpu_build FOLDER: the variables of Horovod's build, with what is missing as an error.
prepare_gpu_build() {
    local cuda
    cuda=$(torch_cuda)
    [ -n "$cuda" ] ||
        die "PyTorch $(installed torch) is built without CUDA; set TORCH to a version of which pip finds the CUDA build"
    find_cuda
    check_cuda_version "$cuda"
    # Horovod asks the first nvcc on PATH which GPUs it can compile for, and compiles with that of HOROVOD_CUDA_HOME.
    export CUDA_HOME HOROVOD_CUDA_HOME=$CUDA_HOME PATH=$CUDA_HOME/bin:$PATH
    # Without this variable Horovod copies the tensors to the host.
    unset HOROVOD_GPU_OPERATIONS
    if [ "$KIND" = nccl ]; then
        find_nccl "$1/nccl"
        export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED HOROVOD_NCCL_INCLUDE HOROVOD_NCCL_LIB
    fi
}

# keep_tensorflow_on_host FILE: leave CUDA and NCCL out of Horovod's library for TensorFlow. TensorFlow is the CPU build,
# which lacks what that library would take from it, and would not load it. This goes before the FILE, a CMakeLists.txt.
keep_tensorflow_on_host() {
    cat - "$1" > "$1.new" << 'END'
get_directory_property(DEFINITIONS COMPILE_DEFINITIONS)
list(FILTER DEFINITIONS EXCLUDE REGEX "^(HAVE_CUDA|HAVE_GPU|HAVE_NCCL|HOROVOD_GPU_.*)=")
set_directory_properties(PROPERTIES COMPILE_DEFINITIONS "${DEFINITIONS}")
list(FILTER SOURCES EXCLUDE REGEX "/ops/([a-z]+_)?(cuda|gpu|nccl)_operations\\.cc$")
list(FILTER LINKER_LIBS EXCLUDE REGEX "nccl")
set(HAVE_CUDA FALSE)

END
    mv "$1.new" "$1"
}
