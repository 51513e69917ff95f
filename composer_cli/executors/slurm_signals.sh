rm -f {folder}/exit-code
again=
"$@" &
chain=$!
trap 'signalled=1; kill -TERM $chain || :' TERM
trap 'signalled=1; again=1; kill -TERM $chain || :' USR1
# A signal ends `wait` with a code of its own; the chain's code is that of a later `wait`, also of a chain that is gone
# by then. 127 is the answer for a chain whose code was taken already.
code=127
signalled=1
while [ -n "$signalled" ]; do
    signalled=
    waited=0
    wait $chain || waited=$?
    [ $waited -eq 127 ] || code=$waited
done
rm -rf "$files"
if [ -n "$again" ] && [ $code -ge 128 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
    echo "The time limit is near: this job queues itself again."
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
echo $code > {folder}/exit-code.new && mv {folder}/exit-code.new {folder}/exit-code
exit $code
