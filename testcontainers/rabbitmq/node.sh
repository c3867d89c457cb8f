# One RabbitMQ node with a port mapper of its own.
#
#   sh node.sh RABBITMQ_SERVER
#
# The node needs epmd. This one listens on a port of its own and ends with the node, so that nobody else's is used and
# none is left behind. Both are children of this shell, which is what the supervisor signals.

epmd &
mapper=$!
# SIGTERM lets the node shut down in order, and the shell goes on waiting for it. SIGUSR1 ends both at once: were the
# shell killed alone, they would be nobody's children and stay. (SIGQUIT is ignored in what a shell runs behind itself.)
trap 'kill -TERM "$node" 2>/dev/null' TERM
trap 'kill -KILL "$node" "$mapper" 2>/dev/null' USR1
"$1" &
node=$!
while wait "$node"; [ -d "/proc/$node" ] && ! grep -qs '^State:[[:space:]]*Z' "/proc/$node/status"; do :; done
kill "$mapper" 2>/dev/null
wait
