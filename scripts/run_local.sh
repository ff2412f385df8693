#!/usr/bin/env bash
# Train on this machine: on all its GPUs, or on the CPU where it has none.
#
#   scripts/run_local.sh [-n RANKS] [-b] [-l LOG] [OVERRIDE ...]
#
#   -n RANKS   processes that share the model (default: one per GPU, or one); 1 starts plain python, more torchrun
#   -b         in the background: goes on when the terminal is closed
#   -l LOG     add its output to this file as well; with -b to this file only (default: run_local.log)
#
#   PYTHON=.venv/bin/python    which Python (default: that of .venv, else the python of the PATH)
#
#   scripts/run_local.sh experiment=sop_hf trainer.max_steps=200
#   scripts/run_local.sh -b -l sop.log experiment=sop_hf
#   scripts/run_local.sh sweep=seeds                          a sweep is always one process per job
set -euo pipefail

refuse() {
    echo "run_local.sh: $1" >&2
    exit 2
}

gpus() { # how many a program that is started here would see
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        tr ',' '\n' <<< "$CUDA_VISIBLE_DEVICES" | sed '/^ *-/,$d' | grep -c '[^ ]' || true # CUDA reads up to a -1
    elif command -v nvidia-smi > /dev/null; then
        { nvidia-smi -L 2> /dev/null || true; } | grep -c '^GPU ' || true
    else
        echo 0
    fi
}

ranks="" log="" background=no
while [ $# -gt 0 ]; do
    case $1 in
        -n | -l)
            [ $# -gt 1 ] || refuse "$1 needs a value"
            if [ "$1" = -n ]; then ranks=$2; else log=$2; fi
            [[ $1 != -n || $2 =~ ^[1-9][0-9]{0,5}$ ]] || refuse "-n $2 is no whole number above 0; write for example -n 8"
            shift 2
            ;;
        -b) background=yes && shift ;;
        *) break ;; # an override, or an option of mtrl.main
    esac
done

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-}
if [ -z "$python" ]; then
    python=$root/.venv/bin/python
    [ -x "$python" ] || python=python
fi

for word in "$@"; do
    case $word in
        sweep=null | +sweep=null | ++sweep=null) ;; # no sweep
        -m | --m* | sweep=* | +sweep=* | ++sweep=*) # torchrun's ranks share one run
            [[ ${ranks:-1} == 1 ]] || refuse "-n $ranks is for one run; jobs of a sweep are one process each"
            ranks=1
            ;;
    esac
done
ranks=${ranks:-$(gpus)}

command=("$python" -m mtrl.main "$@")
if [ "$ranks" -gt 1 ]; then
    command=("$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" -m mtrl.main "$@")
    # A signal saves the run: that long torchrun waits for it before it kills the ranks.
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
fi

[ "$background" = no ] || log=${log:-run_local.log}
[ -z "$log" ] || { : >> "$log"; } 2> /dev/null || refuse "-l $log cannot be written; name another file"
if [ "$background" = yes ]; then
    nohup "${command[@]}" >> "$log" 2>&1 < /dev/null &
    echo "process $! writes to $log; kill -TERM $! saves it and ends it"
elif [ -n "$log" ]; then
    # The run replaces this process and so gets its signals; tee continues, so the last lines after Ctrl-C are logged too.
    exec "${command[@]}" > >(trap '' INT TERM HUP && exec tee -a "$log") 2>&1
else
    exec "${command[@]}"
fi
