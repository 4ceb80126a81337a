#!/usr/bin/env bash
# Sourced by launch.sh, last: run the check and the step inside the job, pass signals on, judge by the run's marks.
# It takes from there the arrays check, step and evidence_finish, what the job is, and say, refuse and in_a_shell.
# shellcheck disable=SC2154
say "job $reference ($job_name), start $((restarts + 1)), on ${SLURM_JOB_NODELIST:-?}: $run_type, $nodes x $ranks ranks by $launcher, in $run_dir"

is_cancelled=no
trap 'is_cancelled=yes' TERM # scancel, a preemption, the time limit: Slurm tells the ranks too
trap 'scancel --signal=USR1 "$reference" || true' USR1 # of --signal=B:USR1@..., which asks this shell alone to tell them
wait_for() { # a background process, through signals; its exit code in `code`
    while :; do
        code=0
        wait "$1" || code=$?
        kill -0 "$1" 2>/dev/null || return 0
    done
}
"${check[@]}" &
wait_for $!
if [ $is_cancelled = yes ]; then
    say "the job was ended before the ranks started"
    exit 143
fi
[ "$code" = 0 ] || refuse "the nodes are not ready (the check ended with $code); what is missing stands above, and nothing was started"

content() { cat "$run_dir/$1" 2>/dev/null || true; }
written() { stat -c '%i %.9Y' "$run_dir/$1" 2>/dev/null || true; } # which file it is and since when; nothing where there is none
preempted_before=$(content RUN_PREEMPTED.txt) failed_before=$(content RUN_FAILED.txt) complete_before=$(written RUN_COMPLETE.txt)
"${step[@]}" &
wait_for $!
step_code=$code ended="the step ended with $code"
read_evidence() { # never for longer than that: what follows of the job, and the time that it has left, is worth more
    if [ ${#evidence_finish[@]} -eq 0 ] || [ $is_cancelled = yes ]; then
        tell_evidence
        return
    fi
    timeout -k 5 "$evidence_seconds" "${evidence_finish[@]}" &
    wait_for $!
    [ "$code" != 124 ] || say "reading the evidence was ended after EVIDENCE_SECONDS=$evidence_seconds"
    [ "$code" = 0 ] || tell_evidence
}
tell_evidence() {
    [ ${#evidence_finish[@]} -eq 0 ] || say "the evidence is not read; do it with: $(in_a_shell "${evidence_finish[@]}")"
}

# srun's exit code says little: it has been seen to be 0 for a step whose node had died. The run's own marks tell; only of
# an old one, which a start that was refused leaves as it is, does the code say whether the run is still what it was.
complete=$(written RUN_COMPLETE.txt)
if [ -n "$complete" ] && { [ "$complete" != "$complete_before" ] || [ "$step_code" = 0 ]; }; then
    read_evidence
    say "complete: $run_dir ($ended)"
    exit 0
fi
preempted=$(content RUN_PREEMPTED.txt) failed=$(content RUN_FAILED.txt)
if [ -n "$preempted" ] && [ "$preempted" != "$preempted_before" ]; then # an old one, of a start that was refused, would requeue again and again
    say "$preempted"
    tell_evidence # the time that is left is for the requeue
    if [ $is_cancelled = yes ]; then
        say "the job was ended from outside; go on with: RUN_DIR=$run_dir sbatch and the same script and variables"
        exit 143
    fi
    if [ "$restarts" -ge "$max_requeues" ]; then
        say "not requeued: it was started $((restarts + 1)) times, and MAX_REQUEUES is $max_requeues"
        exit 143
    fi
    say "requeue: the next start resumes from there"
    scontrol requeue "$reference" || {
        say "Slurm does not requeue job $reference (--no-requeue?); go on with: RUN_DIR=$run_dir sbatch and the same script and variables"
        exit 143
    }
    sleep 60 & # Slurm ends this script now
    wait_for $!
    exit 143
fi
read_evidence
if [ -n "$failed" ] && [ "$failed" != "$failed_before" ]; then
    say "$failed"
else
    say "failed, and the run left no new mark in $run_dir ($ended): its last words stand above"
fi
exit 1
