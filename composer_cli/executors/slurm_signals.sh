rm -f {folder}/exit-code
again=
"$@" &
chain=$!
trap 'kill -TERM $chain || :' TERM
trap 'again=1; kill -TERM $chain || :' USR1
code=0
wait $chain || code=$?
while kill -0 $chain 2>/dev/null; do code=0; wait $chain || code=$?; done
rm -rf "$files"
if [ -n "$again" ] && [ $code -ge 128 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
    echo "The time limit is near: this job queues itself again."
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
echo $code > {folder}/exit-code.new && mv {folder}/exit-code.new {folder}/exit-code
exit $code
