# shellcheck shell=bash
# Build Horovod's wheel from its source distribution. Sourced by scripts/setup, after cuda.sh.

HOROVOD=0.28.1
HOROVOD_SHA256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0
HOROVOD_RECIPE=1            # raise it when what is built below changes

# Without HOME it is the folder that the system has for this user, and not one that all users share.
HOME_FOLDER=${HOME:-$(unset HOME; echo ~)}
CACHE=${HOROVOD_QUANT_CACHE:-${XDG_CACHE_HOME:-$HOME_FOLDER/.cache}/horovod-quant}
CACHE_REMEDY="what is kept there will be installed: remove it, or set HOROVOD_QUANT_CACHE=/a/folder/of/yours"

for_gpu() { [[ $KIND == @(nccl|host|check) ]]; }

horovod_wheel() {
    local tag=cp${PYTHON_VERSION/./}
    echo "horovod-$HOROVOD-$tag-$tag-linux_x86_64.whl"
}

# All that the binary depends on. Horovod compiles for the processor it is built on.
horovod_key() {
    echo "horovod $HOROVOD recipe $HOROVOD_RECIPE python $PYTHON_VERSION torch $(installed torch)" \
        "tensorflow $(installed tensorflow_cpu) openmpi $(installed openmpi)" \
        "g++ $(g++ -dumpfullversion -dumpversion 2> /dev/null || echo none) $(getconf GNU_LIBC_VERSION)" \
        "$(grep -m1 '^flags' /proc/cpuinfo | grep -owE 'avx|fma|f16c' | sort | tr '\n' ' ')$(gpu_key)"
}

# installed NAME: its version in the environment, read without the second that starting Python would take.
installed() {
    local folder
    folder=$(echo "$SITE/$1"-*.dist-info)
    folder=${folder##*/"$1"-}
    echo "${folder%.dist-info}"
}

# build_horovod WHEEL: make this file. One build at a time in the cache: another checkout's may be the one we need.
build_horovod() {
    local wheel=$1 build=$STATE/horovod-build
    lock "${wheel%/*}/lock"
    ! is_kept "$wheel" || return 0
    # Open MPI's compiler command gives its folders unquoted.
    [[ $VENV != *[[:space:]]* ]] ||
        die "Horovod cannot be built in a path with spaces, only installed from its kept wheel;" \
            "make that first by: VENV=\$(mktemp -d)/venv scripts/setup"
    mkdir -p "$build"
    local more_run_path=""
    if for_gpu; then
        prepare_gpu_build "$build"
        more_run_path=:'$ORIGIN/../../nvidia/nccl/lib'
    fi
    get_horovod_source "$build"
    write_compiler_wrapper "$build/c++17" "$more_run_path"
    local begin=$SECONDS
    say "building Horovod $HOROVOD with $(jobs_that_fit) compiler process(es), some minutes; log: $build/log"
    compile_horovod "$build" || die "Horovod could not be built; see above or $build/log"
    say "    done in $((SECONDS - begin)) s"
    keep "$build/dist/$(horovod_wheel)" "$wheel"
    rm -rf "$build"
}

# keep FILE WHEEL
keep() {
    rm -f "$2" "$2.sha256"
    cp "$1" "$2"
    sha256sum < "$2" > "$2.sha256.new"
    mv "$2.sha256.new" "$2.sha256"
}

# is_kept WHEEL: true if it is there as `keep` has left it.
is_kept() {
    make_private "${1%/*}" "$CACHE_REMEDY"
    local file
    for file in "$1" "$1.sha256"; do
        [ -f "$file" ] && [ ! -L "$file" ] && [ -O "$file" ] || return
    done
    [ "$(sha256sum < "$1")" = "$(cat "$1.sha256")" ]
}

get_horovod_source() {
    local build=$1
    [ ! -e "$build/source" ] || return 0
    echo "horovod==$HOROVOD --hash=sha256:$HOROVOD_SHA256" > "$build/requirement.txt"
    timed "getting Horovod's source" run_pip download --no-deps --no-binary horovod --no-build-isolation \
        --require-hashes -d "$build" -r "$build/requirement.txt" || pip_failed "get Horovod's source"
    rm -rf "$build/unpacked"
    mkdir "$build/unpacked"
    tar -xzf "$build/horovod-$HOROVOD.tar.gz" -C "$build/unpacked" --strip-components=1
    # nvcc would parse C++11, and g++'s headers, made to be C++17's by the compiler below, are not.
    sed -i 's/set(CMAKE_CUDA_STANDARD 11)/set(CMAKE_CUDA_STANDARD 17)/' \
        "$build/unpacked/horovod/common/ops/cuda/CMakeLists.txt"
    if for_gpu; then
        keep_tensorflow_on_host "$build/unpacked/horovod/tensorflow/CMakeLists.txt"
    else    # PyTorch's CUDA build, with some nvcc on this machine, would make it a build for GPUs.
        sed -i 's/(torch.version.cuda is not None) and (CUDA_HOME is not None)/False/' \
            "$build/unpacked/cmake/Modules/FindPytorch.cmake"
    fi
    mv "$build/unpacked" "$build/source"
}

# Horovod asks for C++14 and overrides all flags from outside, but PyTorch's headers need C++17 or, from 2.14 on, C++20:
# the last -std wins. -g0 makes a wheel of 2 MB instead of 37. The run path, from horovod/torch/ up to the environment's
# lib/, finds libmpi in whatever environment the wheel is installed; a second argument is more of it. From TensorFlow 2.19
# on the headers lack what Horovod's XLA operations include: that file, all of it under #if, is compiled to nothing.
write_compiler_wrapper() {
    {
        echo '#!/bin/sh'
        echo 'standard=c++17'
        if [ "${KIND:-}" = latest ]; then
            echo 'case "$*" in'
            echo '    *horovod/torch/*.cc*) standard=c++20 ;;'
            echo '    *xla_mpi_ops.cc*) set -- "$@" -UTENSORFLOW_VERSION -DTENSORFLOW_VERSION=0 ;;'
            echo 'esac'
        fi
        echo 'exec g++ "$@" -std=$standard -g0 -Wl,-rpath,'"'"'$ORIGIN/../../../..'"${2:-}'"
    } > "$1"
    chmod +x "$1"
}

# Continue what an interrupted build left; if that fails (a half-written file, say), build from the beginning.
compile_horovod() {
    local build=$1
    rm -rf "$build/dist"
    if [ -e "$build/source/build" ]; then
        say "going on with an interrupted build"
        run_horovod_build "$build" && return
        say "that failed: building from the beginning"
        rm -rf "$build/source/build"
    fi
    run_horovod_build "$build" && return
    grep -E '^make.*\*\*\*|rror:|Killed|No space' "$build/log" | tail -n 8 >&2
    return 1
}

run_horovod_build() {
    local build=$1
    (
        cd "$build/source" || exit
        export CXX=$build/c++17 MAKEFLAGS=-j$(jobs_that_fit)
        export HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_TENSORFLOW=1
        export HOROVOD_WITHOUT_MXNET=1
        "$PY" setup.py --quiet bdist_wheel --dist-dir "$build/dist"
    ) < /dev/null 2>&1 | tee "$build/log" | show_progress
    [ -e "$build/dist/$(horovod_wheel)" ]
}

# Show the first of make's lines in each ten percent.
show_progress() {
    awk '/^\[ *[0-9]+%\]/ {
        percent = substr($0, 2, 3) + 0
        if (percent < next_shown) next
        print "    " percent "%"
        fflush()
        next_shown = percent - percent % 10 + 10
    }'
}

# A compiler process takes up to 2 GB.
jobs_that_fit() {
    local cores memory
    cores=$(env -u OMP_NUM_THREADS nproc)     # which would otherwise obey that variable
    memory=$(awk '/^MemAvailable/ { print int($2 / 2000000) }' /proc/meminfo)
    [ "$memory" -ge 1 ] || memory=1
    echo "${JOBS:-$((memory < cores ? memory : cores))}"
}
