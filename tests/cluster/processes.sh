# Functions for the scripts in this folder, to be sourced. They identify a process by id
# and start time, because the kernel reuses process ids.
# shellcheck shell=bash

# start_time PID: the clock tick at which a live process started; nothing without one.
start_time() {
    local line fields
    { read -r line <"/proc/$1/stat"; } 2>/dev/null || return 0
    # The second field is the program's name, which may contain blanks and brackets.
    read -ra fields <<<"${line##*) }"
    # A zombie process counts as ended.
    if [[ ${fields[0]} != Z ]]; then echo "${fields[19]}"; fi
}

# runs FILE: whether the process lives whose "PID START_TIME" the file holds.
runs() {
    local pid started
    { read -r pid started <"$1"; } 2>/dev/null || return 1
    [[ -n $started && $(start_time "$pid") == "$started" ]]
}

# wait_for SECONDS COMMAND...: run the command again and again until it succeeds.
wait_for() {
    local naps=$(($1 * 50))
    shift
    until "$@" 2>/dev/null; do
        ((naps-- > 0)) || return 1
        sleep 0.02
    done
}
