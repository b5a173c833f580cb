#!/bin/sh
# Measures on one GPU what docs/benchmarks.md shows: bench/reproduce.sh FOLDER PART...
# A copy of the sources without .git names its commit by HEADWAY_COMMIT; every result file holds it.
#
# FOLDER: for the JSON files, such as bench/results/h200. PART: tests, engine, crossover, kernels, peers, conformance, adapter, states, rules,
# weights, traces, priors; about 10, 6, 20, 25, 10, 6, 2, 6, 2, 20, 5 and 12 minutes on an H200 (of kernels, decode-heldout takes most); parts may
# run side by side, each on a GPU of its own (CUDA_VISIBLE_DEVICES), crossover before engine. HEADWAY names the command if it is not `headway`
# (HEADWAY="python3 -P -m headway"), PYTHON that of the tests.
# Several GPUs, RANKS of them (2), in a folder such as bench/results/h200x2: ranks, or one after the other ranks-sums, ranks-8b, ranks-experts,
# ranks-70b, ranks-vllm and ranks-tests (which ranks leaves out), each a run of its own: about 45, 110, 150, 150, 400 and 120 seconds, as far as
# can be told before they have run.
# A part that fails is reported and does not stop the others.
set -u
[ $# -ge 2 ] || { sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 2; }
HEADWAY=${HEADWAY:-headway} PYTHON=${PYTHON:-python3}
out=$1; shift
mkdir -p "$out"
failed=""

run() {  # a name, then arguments of headway
    name=$1; shift
    echo "== $name: $HEADWAY $*"

    $HEADWAY "$@" || failed="$failed $name"
}

study() {  # a name, a module of headway.bench.studies, then its arguments
    name=$1 module=headway.bench.studies.$2; shift 2
    echo "== $name: $PYTHON -m $module $*"

    $PYTHON -P -m "$module" "$@" || failed="$failed $name"
}

engine() {  # a static backend and, if its table is there, auto
    table="$out/crossover-16-8-128.json"
    small="--model qwen3-0.6b --load-format dummy --dtype bfloat16 --max-model-len 4096"
    large="--model llama-3-8b --load-format dummy --dtype bfloat16 --attn-backend"
    bench="bench throughput"
    for who in triton auto; do
        choice="--attn-backend triton --block-size 256"
        [ $who = triton ] || choice="--crossover-table $table"
        [ $who = triton ] || [ -f "$table" ] || break
        at="$out/throughput-$who"
        run nano $bench $small $choice --workload nano --repeat 2 --output "$at-nano.json"
        run 512 $bench $small $choice --batch-size 1,16,64 --input-len 512 --output-len 512 --repeat 2 --output "$at-512.json"
        run 1024 $bench $small $choice --batch-size 64,256 --input-len 1024 --output-len 1024 --repeat 1 --output "$at-1024.json"
    done
    run 8b-1 $bench $large triton --batch-size 1 --input-len 512 --output-len 256 --repeat 2 --output "$out/throughput-8b-1.json"
    run 8b-64 $bench $large triton --batch-size 64 --input-len 1024 --output-len 512 --repeat 1 --output "$out/throughput-8b-64.json"
    run 8b-first $bench $large prefill=hopper,decode=triton --batch-size 1 --input-len 8190 --output-len 2 --repeat 5 \
        --output "$out/throughput-8b-first.json"
}

crossover() {
    for geometry in 16/8/128 32/8/128; do
        file="$out/crossover-$(echo $geometry | tr / -)"
        run table bench crossover --geometry $geometry --layouts nhd --backends triton,hopper,hopper_decode,flash_attn_3 --budget 170s \
            --output "$file.json"
        run regret table regret "$file.json" --points 96 --seed 1,2 --output "$out/regret-$(echo $geometry | tr / -).json"
    done
    whole="bench crossover --level engine --model qwen3-0.6b --load-format dummy --dtype bfloat16"
    table="--crossover-table $out/crossover-16-8-128.json"
    run grid $whole --cell-limit 40s $table --workload 32x1024+1024 --backends auto,triton,flash_attn_3 --repeat 1 \
        --output "$out/crossover-engine.json"
    # 64 short prompts (128 in, 64 out) beside 4 documents (32,768 in, 64 out)
    run mixed $whole --cell-limit 60s $table --workload long --repeat 3 --mixed 64q128s192_4q32ks32832 --backends auto,triton \
        --output "$out/crossover-engine-mixed.json"
}

kernels() {
    both="--geometry 32/8/128 --geometry 16/8/128"
    bench="bench kernel"
    study decode kernel_peers --phase decode --backends triton --only-peers flash_attn,flashinfer.fa2,flashinfer.cuda_cores $both \
        --layouts nhd --block-sizes 16,256 --output "$out/decode.json"
    # shapes outside every grid
    unseen="--geometry 16/2/128 --geometry 24/8/128 --geometry 28/4/128 --geometry 32/32/128 --geometry 40/8/128 --geometry 64/8/128"
    cases=1q1s700,1q1s3000,1q1s11000,3q1s20000,5q1s1700,12q1s600,24q1s5200,35q1s9606,70q1s1100,150q1s400,200q1s2600
    study decode-heldout kernel_peers --phase decode --backends triton,hopper_decode \
        --only-peers flash_attn,flash_attn_3.bare,flashinfer.fa2,flashinfer.cuda_cores,xformers.splitk $unseen --geometry 64/8/64 \
        --geometry 8/1/256 --layouts nhd --block-sizes 16,256 --cases "$cases,60q1s500_2q1s30000,20q1s300_20q1s6000" \
        --warmup-ms 5 --rep-ms 20 --output "$out/decode-heldout.json"
    run paged $bench --phase decode --backends triton,vllm_paged --layouts vllm_5d --block-sizes 16 $both \
        --output "$out/vllm-paged-decode.json"
    study prefill kernel_peers --phase prefill --backends hopper,triton,flash_attn_3 --only-peers flash_attn,flash_attn_3.bare $both --layouts nhd \
        --block-sizes 256 --output "$out/prefill.json"
    study extend kernel_peers --phase prefill --backends hopper,triton,flash_attn_3 --only-peers flash_attn,flash_attn_3.bare $both --layouts nhd \
        --block-sizes 16,256 --cases 1q16s3k,1q64s30000,1q200s5200,1q512s2560,1q512s60512,1q2ks10k,8q200s3200 --output "$out/extend.json"
    heldout="kernel_peers --phase prefill --backends hopper,triton,flash_attn_3 --only-peers flash_attn_3.bare --layouts nhd --warmup-ms 4 --rep-ms 16"
    many="--geometry 32/32/128 --geometry 64/8/128 --geometry 8/1/256"
    study prefill-heldout $heldout $many --geometry 28/4/128 --geometry 16/8/128 --block-sizes 256 \
        --cases 1q300,1q1500,1q5000,1q12000,2q6000,6q900,16q250 --output "$out/prefill-heldout.json"
    study extend-heldout $heldout $many --geometry 32/8/128 --geometry 16/2/128 --block-sizes 16,256 \
        --cases 1q16s3k,1q200s5200,1q512s60512,1q2ks8k,8q200s3200,3q100s9000 --output "$out/extend-heldout.json"
    run write $bench --phase write --layouts nhd,hnd,vllm_5d --output "$out/write.json"
}

conformance() {  # every backend at once: most of the time goes into compiling kernels
    for name in triton hopper flash_attn flash_attn_3 flash_attn_4 torch_varlen xformers vllm_paged sdpa sdpa.math; do
        $HEADWAY check $name --device cuda --jobs 2 --json "$out/check-$name.json" >"$out/check-$name.log" 2>&1 &
        pids="${pids:-} $!:$name"
    done
    for each in $pids; do
        wait "${each%%:*}"
        code=$?
        cat "$out/check-${each#*:}.log"; rm -f "$out/check-${each#*:}.log"
        [ $code -ne 1 ] || failed="$failed check-${each#*:}"  # 2: not available on this machine, which its file says
    done
}

adapter() {  # transformers' code through the adapter beside the native decoder
    for way in headway transformers; do
        run adapter-$way bench throughput --model qwen3-0.6b --load-format dummy --dtype bfloat16 --model-impl $way --max-model-len 4096 \
            --batch-size 64 --input-len 512 --output-len 512 --output "$out/adapter-$way.json"
    done
}

tests() {
    $PYTHON -m pytest -q -m gpu -p no:cacheprovider tests/headway tests/server tests/models tests/kernels tests/core tests/bench tests/backends ||
        failed="$failed tests"
}

peers() {  # whichever is installed; one that is not says so
    for who in vllm nano-vllm transformers; do
        peer="$PYTHON -P -m headway.bench.studies.engines $who --repeat 2"
        echo "== peers: $who"
        $peer --workload nano --output "$out/peer-$who-nano.json" || failed="$failed $who-nano"
        $peer --batch-size 1,16,64 --input-len 512 --output "$out/peer-$who-512.json" || failed="$failed $who-512"
        $peer --batch-size 320,512 --input-len 256 --output "$out/peer-$who-256.json" || failed="$failed $who-256"
    done
    wide="--model qwen3-0.6b --load-format dummy --dtype bfloat16 --attn-backend triton --block-size 256 --max-num-seqs 512"
    run wide bench throughput $wide --batch-size 320,512 --input-len 256 --output-len 256 --repeat 2 --output "$out/throughput-wide.json"
}

rules() { study rules rules --output "$out/rules.json"; }  # attention rules in triton and FlexAttention

states() {  # layers with a state alone; a Qwen3-Next cut to 12 layers of 128 experts, with random weights, and vLLM's beside it
    run states bench kernel --states --model qwen3-next-80b-a3b --output "$out/kernel-states.json"
    cut=$(mktemp -d)/qwen3-next-12
    $PYTHON -P - "$cut" <<-'end' || { failed="$failed states-cut"; return; }
	import json, pathlib, sys
	from headway.models.checkpoints.locate import locate
	config = json.loads((locate("qwen3-next-80b-a3b", weights=False) / "config.json").read_text())
	pathlib.Path(sys.argv[1]).mkdir()
	(pathlib.Path(sys.argv[1]) / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 12, "num_experts": 128}))
	end
    run hybrid bench throughput --model "$cut" --load-format dummy --max-model-len 8192 --batch-size 1,16,64 --input-len 512 --output-len 512 \
        --repeat 2 --autotune-budget 10 --output "$out/hybrid-512.json"
    $PYTHON -P -m headway.bench.studies.engines vllm --model "$cut" --repeat 2 --batch-size 1,16,64 --input-len 512 \
        --output "$out/hybrid-vllm-512.json" || failed="$failed hybrid-vllm"
}

weights() {  # weights as they are published, random ones in those forms, and vLLM over the same folders where it is installed
    at=$(mktemp -d) sizes="--batch-size 1,16,64,256 --input-len 512 --output-len 512"
    for model in llama-3-8b:bf16 llama-3-8b:fp8 llama-3-8b:w4a16 qwen3-30b-a3b:bf16 qwen3-30b-a3b:fp8-blocks gpt-oss-20b:mxfp4; do
        shapes=${model%%:*} name=$(echo "$model" | tr : -) folder=$at/$(echo "$model" | tr : -)
        load=dummy written=""
        [ "${model#*:}" != mxfp4 ] || load=auto written=--weights  # both engines must pick the same experts
        $PYTHON -P -m headway.bench.studies.weight_shapes "${model#*:}" "$folder" --model "$shapes" $written || { failed="$failed $name"; continue; }
        run "weights-$name" bench throughput --model "$folder" --load-format $load --max-model-len 2048 $sizes --repeat 1 \
            --output "$out/weights-$name.json"
        case $model in *30b*) continue ;; esac
        $PYTHON -P -m headway.bench.studies.engines vllm --model "$folder" --load-format $load --repeat 1 --batch-size 1,16,64,256 \
            --input-len 512 --output "$out/weights-$name-vllm.json" || failed="$failed weights-$name-vllm"
    done
    rm -rf "$at"
}

traces() {  # the kernels of a decode step by the time they take, and the pauses between: trace-MODEL-FORM-REQUESTS.txt
    at=$(mktemp -d)
    for work in qwen3-0.6b:bf16:1 llama-3-8b:w4a16:16 qwen3-30b-a3b:fp8-blocks:1 gpt-oss-20b:mxfp4:16; do
        shapes=${work%%:*} batch=${work##*:} form=${work#*:} && form=${form%:*}
        name=$shapes-$form-$batch folder=$at/$shapes
        $PYTHON -P -m headway.bench.studies.weight_shapes "$form" "$folder" --model "$shapes" || { failed="$failed trace-$name"; continue; }
        run "trace-$name" bench throughput --model "$folder" --load-format dummy --max-model-len 2048 --batch-size "$batch" --input-len 512 \
            --output-len 128 --attn-backend prefill=hopper,decode=triton --repeat 1 --profile "$at/$name.json"
        $PYTHON -P -m headway.bench.studies.step_trace "$at/$name.json" >"$out/trace-$name.txt" || failed="$failed trace-$name-kernels"
        cat "$out/trace-$name.txt"
    done
}

priors() {  # whole tables that may ship, and what auto loses by them; run again, it goes on with tables that its time did not complete
    mkdir -p "$out/priors"
    for geometry in 32/8/128 16/8/128 64/8/128 40/8/128; do  # Llama 3 8B; Qwen3 0.6B and 1.7B; Llama 3 70B; Qwen3 14B
        name=$(echo $geometry | tr / -)
        run "table-$name" bench crossover --geometry $geometry --budget 170s --resume --output "$out/priors/crossover-$name.json"
        run "regret-$name" table regret "$out/priors/crossover-$name.json" --points 24 --seed 11,12 --output "$out/priors/regret-$name.json"
    done
    # then, in a checkout: python3 -P -m headway.bench.studies.ship_priors "$out"/priors/crossover-*.json
}

# A file of each run lies there as soon as the run has ended, and the table of all of them is made anew after each part.
several=${RANKS:-2}

ranks_part() {  # a function below, after what all of them need
    # No multicast of NVLink: not every machine's fabric lets a process have it.
    export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 VLLM_ALLREDUCE_USE_SYMM_MEM=0
    [ -f "$out/predicted.json" ] || study predicted ranks predict --ranks "$several" --output "$out/predicted.json"
    "$1"
    ! ls "$out"/throughput-*-tp"$several".json >/dev/null 2>&1 || study report ranks report "$out"
}

ranks_run() {  # a name of the model for files, GPUs, requests at once, passes, then options of the engine
    name=$1 size=$2 batches=$3 repeat=$4; shift 4
    run "$name-tp$size" bench throughput "$@" --load-format dummy --dtype bfloat16 --attn-backend prefill=hopper,decode=triton \
        --autotune-budget 10 --max-model-len 1024 --max-num-seqs 64 --batch-size "$batches" --input-len 512 --output-len 512 --repeat "$repeat" \
        --tensor-parallel-size "$size" --output "$out/throughput-$name-tp$size.json"
}

ranks_sums() { study sums all_reduce --ranks "$several" --output "$out/all-reduce.json"; }

ranks_8b() {  # on one GPU, then on several
    for size in 1 "$several"; do ranks_run 8b "$size" 1,64 2 --model llama-3-8b; done
}

ranks_experts() {
    for size in 1 "$several"; do ranks_run 30b-a3b "$size" 64 2 --model qwen3-30b-a3b; done
}

ranks_70b() {  # weights in bfloat16 are 66 GiB on each of two GPUs
    ranks_run 70b "$several" 1 1 --model llama-3-70b --max-num-batched-tokens 2048 --kv-cache-memory 1GiB
    ranks_run 70b-fp8 "$several" 1 1 --model llama-3-70b --max-num-batched-tokens 2048 --kv-cache-memory 1GiB --quantization fp8
}

ranks_vllm() {  # where it is installed
    peer="$PYTHON -P -m headway.bench.studies.engines vllm --tensor-parallel-size $several --input-len 512"
    $peer --model llama-3-8b --batch-size 1,64 --repeat 2 --output "$out/vllm-8b-tp$several.json" || failed="$failed vllm-8b"
    $peer --model qwen3-30b-a3b --batch-size 64 --repeat 2 --output "$out/vllm-30b-a3b-tp$several.json" || failed="$failed vllm-30b-a3b"
    $peer --model llama-3-70b --quantization fp8 --batch-size 1 --repeat 1 --output "$out/vllm-70b-fp8-tp$several.json" ||
        failed="$failed vllm-70b-fp8"
}

ranks_tests() { $PYTHON -m pytest -q -m gpu -p no:cacheprovider tests/core/engine/ranks tests/kernels/all_reduce || failed="$failed ranks-tests"; }

ranks() {
    for each in sums 8b experts 70b vllm; do ranks_part "ranks_$each"; done
}

parts="tests engine crossover kernels peers conformance adapter states rules weights traces priors"
several_parts="ranks-sums ranks-8b ranks-experts ranks-70b ranks-vllm ranks-tests"
for part in "$@"; do
    case " $parts ranks " in *" $part "*) "$part"; continue ;; esac
    case " $several_parts " in *" $part "*) ranks_part "$(echo "$part" | tr - _)"; continue ;; esac
    echo "bench/reproduce.sh: PART: needs $(echo "$parts ranks" | sed 's/ /, /g'), or one of $several_parts, got $part" >&2; exit 2
done
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
