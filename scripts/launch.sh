#!/usr/bin/env bash
# Starts a run of several ranks, and starts it again when a rank or a host was lost: the same command continues from
# the newest good checkpoint.
#   scripts/launch.sh [-np N] [--restarts K] [OPTIONS OF MPIRUN OR SRUN] -- PROGRAM ARGUMENTS
#   scripts/launch.sh -np 8 -- build/cuda/parka train configs/llama2-7b-parka.json
# Uses srun inside a Slurm job and mpirun elsewhere; without either, parka starts its ranks itself (--ranks N). On several
# hosts mpirun needs -x MASTER_ADDR=HOST, that of rank 0. N is the number of ranks over all hosts: by default the job's tasks under Slurm, else the GPUs of this host, else 1. K (default 3) is how often a lost run
# is started again.
#
# SIGTERM, SIGUSR1, SIGHUP and Ctrl-C to this script ask the ranks to save and stop; nothing is started again then. Ends with
# the last exit code: 0 if the run is done, 75 if it was stopped and has more to do, also while it waited to be started
# again. PARKA_RESTART_SECONDS (default 10) is the wait before a restart.
set -uo pipefail

fail() { echo "launch.sh: $*" >&2; exit 2; }
say() { echo "launch.sh: $*" >&2; }
number() { [[ ${2:-} =~ ^[0-9]+$ ]] || fail "$1: expected a number, got '${2:-}'"; }

ranks="" restarts=3 options=()
while [ $# -gt 0 ] && [ "$1" != "--" ]; do
  case "$1" in
    -np | -n) number "$1" "${2:-}"; ranks=$2; shift 2 ;;
    --restarts) number "$1" "${2:-}"; restarts=$2; shift 2 ;;
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit 0 ;;
    *) options+=("$1"); shift ;;
  esac
done
[ $# -ge 2 ] || fail "nothing to start; usage: scripts/launch.sh [-np N] [--restarts K] [OPTIONS] -- PROGRAM ARGUMENTS"
shift

[ -n "${SLURM_JOB_ID:-}" ] && command -v srun >/dev/null && slurm=1 || slurm=""
if [ -z "$slurm" ] && [ -z "$ranks" ]; then
  ranks=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
  [ "$ranks" -gt 0 ] || ranks=1
fi
# Until a rank answers SIGUSR1 it must not die of it: mpirun may then hang.
program=(env --ignore-signal=USR1 "$@")
if [ -n "$slurm" ]; then
  # A rank that ends with an error takes the others with it, should they not notice by themselves.
  command=(srun --kill-on-bad-exit=1 ${ranks:+-n "$ranks"} "${options[@]}" "${program[@]}")
elif command -v mpirun >/dev/null; then
  command=(mpirun -np "$ranks" --bind-to none "${options[@]}" "${program[@]}")
else
  [ ${#options[@]} -eq 0 ] || fail "neither mpirun nor srun was found, which could take ${options[*]}; leave it out"
  command=("${program[@]}" --ranks "$ranks")
fi

# mpirun answers SIGTERM and Ctrl-C by killing its ranks a second later, and hands SIGUSR1 on to them, as srun and parka
# do: parka then saves and stops. Running them under setsid keeps a terminal's Ctrl-C from it.
child="" stopping="" asker="" pause="" interrupted=""
before_it_answers=$((128 + $(kill -l USR1)))  # the code of what SIGUSR1 ended, because it had no handler yet
# Every second: what mpirun gets before it can answer is lost, and asking again is harmless.
ask() {
  [ -z "$asker" ] || return 0
  while kill -USR1 "$child"; do sleep 1; done >/dev/null 2>&1 &
  asker=$!
}
stop() {
  stopping=$1 interrupted=1
  say "$1: asking the run to save and stop"
  [ -z "$child" ] || ask
  [ -z "$pause" ] || kill "$pause" 2>/dev/null
}
trap 'stop SIGTERM' TERM
trap 'stop SIGUSR1' USR1
trap 'stop SIGHUP' HUP
trap 'stop SIGINT' INT

# True if a run that ended with this code may go well when it is started again: another rank was lost (5), silent data
# corruption was found (6), or a signal ended one (128 + N). Bad input, numbers that are not finite, a full disk and defects stay what they are.
may_pass() { [ "$1" -eq 5 ] || [ "$1" -eq 6 ] || [ "$1" -gt 128 ]; }

for ((start = 0; ; start++)); do
  if [ -n "$stopping" ]; then
    say "not started after $stopping (exit code 75): the same command continues the run"
    exit 75
  fi
  say "starting: ${command[*]}"
  # mpirun takes its handler of SIGUSR1 away before it ends. Asked again then, it would die of the signal, and its code be lost.
  ([[ ${command[0]} != mpirun ]] || trap '' USR1; exec setsid "${command[@]}") &
  child=$!
  [ -z "$stopping" ] || ask  # a signal came since
  # A signal to this script interrupts `wait`, which must then be called again. It knows the code of a child that has ended, too.
  while :; do
    interrupted=""
    wait "$child"
    code=$?
    [ -n "$interrupted" ] || break
  done
  child=""
  [ -z "$asker" ] || kill "$asker" 2>/dev/null
  if [ "$code" -eq 0 ]; then
    say "done"
    exit 0
  fi
  if [ "$code" -eq 75 ]; then
    say "saved and stopped, not done (exit code 75): the same command continues the run"
    exit 75
  fi
  if [ -n "$stopping" ] && [ "$code" -eq "$before_it_answers" ]; then
    say "ended before it had begun, after $stopping (exit code 75): the same command continues the run"
    exit 75
  fi
  if [ -n "$stopping" ]; then
    say "ended with exit code $code after $stopping; not started again"
    exit "$code"
  fi
  may_pass "$code" || { say "ended with exit code $code, which a restart would not fix"; exit "$code"; }
  [ "$start" -lt "$restarts" ] || { say "ended with exit code $code; given up after $restarts restarts"; exit "$code"; }
  say "ended with exit code $code; restart $((start + 1)) of $restarts"
  sleep "${PARKA_RESTART_SECONDS:-10}" 2>/dev/null &
  pause=$!
  [ -z "$stopping" ] || kill "$pause" 2>/dev/null  # a signal came since
  wait "$pause"
  pause=""
done
