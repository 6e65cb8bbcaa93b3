# shellcheck shell=bash
# Install the frameworks on top of Horovod that examples use. Sourced by scripts/setup.
#
# Each is a folder of packages beside the environment, with what the environment lacks; put on PYTHONPATH it adds to that.
# So nothing in the environment is replaced, and frameworks do not disturb each other.

FRAMEWORKS=${VENV%/}-frameworks
FRAMEWORK_PINS=scripts/frameworks       # a file for each, NAME.txt: all its packages, direct and transitive

# What cannot be installed (no wheels for this platform, say) is not a failure: its tests are left out.
install_frameworks() {
    local pins name folder input
    [ ! -e "$FRAMEWORKS" ] || require_owner "$FRAMEWORKS"
    for pins in "$FRAMEWORK_PINS"/*.txt; do
        name=$(basename "$pins" .txt)
        folder=$FRAMEWORKS/$name
        input="python $PYTHON_VERSION $(sha256sum < "$pins")"
        [ "$(cat "$folder/installed" 2> /dev/null)" != "$input" ] || continue
        if timed "installing $name for its examples: $(first_pin "$pins")" install_framework "$pins" "$folder"; then
            printf '%s\n' "$input" > "$folder/installed"
        else
            leave_out "$folder"
        fi
    done
}

first_pin() { grep -m1 '^[^#-].*==' "$1"; }

# In a folder without the file `installed` nothing is to be trusted: a failed or interrupted installation begins anew.
install_framework() {
    local pins=$1 folder=$2
    rm -rf "$folder" && mkdir -p "$folder" || return
    STATE=$folder run_pip install --no-deps --no-build-isolation --only-binary :all: \
        --target "$folder/packages" -r "$pins" && rm -rf "$folder/tmp"
}

leave_out() {
    local folder=$1 reason
    reason=$(grep -iE '^ *(error|[a-z]*error:)' "$folder/pip.log" 2> /dev/null | tail -n 1 || true)
    printf '%s\n' "${reason:-see $folder/pip.log}" > "$folder/failure"
    say "    left out, with its tests: $(cat "$folder/failure")"
}
