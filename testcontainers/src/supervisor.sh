# Keeps one server and its directory for the test process at the other end of stdin.
#
#   sh -c '<this>' supervisor DIRECTORY LOG END_SIGNAL COMMAND [ARGUMENT...]
#
# Orders come one a line on stdin; each is answered by one line on stdout. When stdin closes, because the owner asked,
# ended, panicked or was SIGKILLed, the server is ended and the directory removed: nothing of this depends on the
# owner running any code.

directory=$1
log=$2
end_signal=$3
shift 3
server=

# A zombie is not running, though kill -0 says so.
running() {
    [ -d "/proc/$1" ] && ! grep -qs '^State:[[:space:]]*[ZX]' "/proc/$1/status"
}

# PostgreSQL's backends each sit in a session of their own, so a process group does not reach them.
children() {
    grep -ls "^PPid:[[:space:]]*$server\$" /proc/[0-9]*/status | cut -d/ -f3
}

# The parent is stopped first: a stopped process forks no child that the list would miss.
signal_all() {
    kill -STOP "$server" 2>/dev/null
    family=$(echo $(children))
    kill "-$1" $family "$server" 2>/dev/null
}

end() {
    trap '' HUP INT TERM
    if [ -n "$server" ]; then
        # An immediate shutdown first, where the server has one: it gives its shared memory back.
        kill -CONT $(children) "$server" 2>/dev/null
        kill "-$end_signal" "$server" 2>/dev/null
        turns=0
        while running "$server" && [ "$turns" -lt 40 ]; do
            sleep 0.05
            turns=$((turns + 1))
        done
        signal_all KILL
        # A PostgreSQL that ended by SIGKILL leaves a segment, whose id is the last word of this file's seventh line.
        segment=$(sed -n '7s/.* //p' "$directory/data/postmaster.pid" 2>/dev/null)
        if [ -n "$segment" ]; then ipcrm -m "$segment" 2>/dev/null; fi
    fi
    # A process in the middle of dying may still put a file in; a directory that stays is tried again.
    turns=0
    while [ -e "$directory" ] && [ "$turns" -lt 50 ]; do
        rm -rf "$directory" 2>/dev/null || sleep 0.1
        turns=$((turns + 1))
    done
    exit 0
}
trap end HUP INT TERM

while read -r order; do
    case $order in
        start)
            # A session of its own keeps the terminal's signals away, and the kernel's SIGHUP to orphaned groups
            # with a stopped member.
            setsid "$@" </dev/null >>"$log" 2>&1 &
            server=$!
            echo "$server"
            ;;
        # The answer lists who must be gone before the data directory may be used again.
        KILL) signal_all KILL; echo "$server $family" ;;
        # SIGSTOP and SIGCONT mean the whole server: a stopped postmaster alone would leave its backends serving.
        STOP) signal_all STOP; echo "$server $family" ;;
        CONT) family=$(echo $(children)); kill -CONT $family "$server" 2>/dev/null; echo "$server $family" ;;
        # Any other signal is for the server alone, which passes it on as it sees fit.
        *) family=$(echo $(children)); kill "-$order" "$server" 2>/dev/null; echo "$server $family" ;;
    esac
done
end
