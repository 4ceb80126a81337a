"""Tables as people write them: nothing is wrong with them, and each once looked as if something were."""

from __future__ import annotations

# name -> (suffix, text). The figures are made up, and each follows from the others by the convention in its name.
ORDINARY = {
    "a speed-up on the row above": (".md", """
# Speeding up

| Optimization | ms/step | Speedup |
|---|---|---|
| baseline | 1000 | 1.0x |
| TF32 | 333 | 3.0x |
| bf16 | 300 | 1.11x |
"""),
    "MFU on the row above": (".md", """
| Stage | MFU | Speedup vs prev |
|---|---|---|
| base | 20.1% | 1.00x |
| flash | 30.2% | 1.50x |
| compile | 36.2% | 1.20x |
"""),
    "factors of memory": (".md", """
| Method | tokens/s | Memory reduction |
|---|---|---|
| baseline | 10,000 | 1x |
| ours | 9,500 | 2.1x |
"""),
    "factors of compression": (".md", """
| Method | tokens/s | Compression |
|---|---|---|
| dense | 10,000 | 1x |
| 8-bit gradients | 11,500 | 4x |
"""),
    "factors of cost": (".md", """
| GPU | img/s | Cost |
|---|---|---|
| T4 | 410 | 1x |
| A10G | 980 | 1.6x |
"""),
    "a speed-up of the steps to a loss": (".md", """
| Optimizer | tokens/s | Steps to 3.28 | Speedup |
|---|---|---|---|
| AdamW | 1,012,000 | 9,500 | 1.00x |
| Muon | 984,000 | 7,000 | 1.32x |
"""),
    "a column of sharded ranks": (".md", """
| GPUs | DP | FSDP | TP | tok/s/GPU |
|---|---|---|---|---|
| 8 | 8 | 1 | 1 | 7,912 |
| 16 | 16 | 1 | 1 | 7,811 |
| 32 | 32 | 1 | 1 | 7,700 |
| 16 | 8 | 1 | 2 | 7,102 |
| 32 | 8 | 1 | 4 | 6,902 |
| 32 | 4 | 8 | 1 | 7,402 |
"""),
    "expert ranks": (".md", """
| GPUs | TP | PP | EP | DP | MFU |
|---|---|---|---|---|---|
| 64 | 4 | 2 | 1 | 8 | 38.1% |
| 64 | 2 | 4 | 1 | 8 | 37.4% |
| 128 | 4 | 4 | 1 | 8 | 36.0% |
| 128 | 2 | 1 | 8 | 8 | 31.0% |
"""),
    "FLOPs of a whole run": (".md", """
Trained on A100 80GB.

| Model | Params | Tokens | GPUs | Compute (PFLOPs) | Time (h) |
|---|---|---|---|---|---|
| A | 124M | 10B | 8 | 7,440 | 1.5 |
| B | 1.3B | 26B | 8 | 202,800 | 40 |
| C | 7B | 140B | 64 | 5,880,000 | 145 |
"""),
    "PFLOP-days": (".md", """
All models were trained on V100.

| Model | Params | GPUs | PFLOP-days |
|---|---|---|---|
| small | 125M | 8 | 2.6 |
| XL | 1.3B | 64 | 27.5 |
| 175B | 175B | 1024 | 3640 |
"""),
    "GFLOPs of an image": (".md", """
V100, batch 256

| Model | Params | GFLOPs | img/s | GPUs |
|---|---|---|---|---|
| ResNet-50 | 25.6M | 4.1 | 2,800 | 1 |
| ResNet-101 | 44.5M | 7.8 | 1,650 | 1 |
| ViT-B/16 | 86.6M | 17.6 | 1,100 | 1 |
"""),
    "activation memory": (".md", """
| Model | Params | GPUs | Activation memory (GB) |
|---|---|---|---|
| 7B | 7B | 1 | 2.1 |
| 13B | 13B | 2 | 3.0 |
| 70B | 70B | 8 | 5.5 |
"""),
    "a cache": (".md", """
| Model | Params | GPUs | KV cache memory (GB) |
|---|---|---|---|
| 7B | 7B | 1 | 2.1 |
| 13B | 13B | 1 | 3.3 |
"""),
    "an average of ratios": (".md", """
| Model | eager tok/s | compile tok/s | Speedup |
|---|---|---|---|
| a | 10,012 | 13,015 | 1.30x |
| b | 20,400 | 24,480 | 1.20x |
| c | 5,020 | 9,036 | 1.80x |
| d | 8,010 | 12,015 | 1.50x |
| e | 6,000 | 8,400 | 1.40x |
| Average | 11,811 | 15,510 | 1.43x |
"""),
    "a time with its start-up": (".md", """
| Run | Steps | Step time (ms) | Total time (s) |
|---|---|---|---|
| a | 20000 | 250.3 | 5011.1 |
| b | 20000 | 125.4 | 2513.0 |
| c | 2000 | 62.8 | 129.1 |
"""),
    "a time with evaluations": (".md", """
| Run | Tokens | Time (s) | tokens/s |
|---|---|---|---|
| no eval | 1,310,720,000 | 6,554.0 | 200,000 |
| no eval, compile | 1,310,720,000 | 5,243.0 | 250,000 |
| eval every 100 | 1,310,720,000 | 5,612.0 | 250,100 |
"""),
    "another model": (".md", """
| Config | tok/s/GPU | MFU |
|---|---|---|
| llama | 9,700 | 42.0% |
| llama + fused adam | 9,930 | 43.0% |
| llama + bigger batch | 10,160 | 44.0% |
| llama + overlap | 10,390 | 45.0% |
| llama + fp32 logits | 9,240 | 40.0% |
| llama + long warm-up | 9,700 | 42.0% |
| mistral + overlap | 9,980 | 47.1% |
"""),
    "another depth": (".md", """
8 x H100

| Run | tok/sec | MFU |
|---|---|---|
| d20 base | 1,090,000 | 47.9% |
| d20 fa3 | 1,120,000 | 49.2% |
| d20 muon | 1,065,000 | 46.8% |
| d26 fa3 | 560,000 | 51.6% |
"""),
    "a node that is not full": (".md", """
| Nodes | GPUs | tokens/s |
|---|---|---|
| 1 | 8 | 64,000 |
| 2 | 16 | 126,000 |
| 4 | 32 | 250,000 |
| 5 | 36 | 279,000 |
"""),
    "numbers of ranks": (".csv", """
rank,tokens_per_sec,step_time_ms,memory_gb
0,12344.9,663.59,41.0
1,12345.6,663.56,41.2
2,12345.6,663.56,41.0
3,12345.6,663.56,41.0
"""),
    "devices that are not known": (".md", """
## Results
Our earlier A100 runs are in the appendix.

| Accelerator | TFLOP/s per chip | MFU |
|---|---|---|
| MI355X | 1,010 | 40.4% |
| Gaudi 3 | 720 | 39.2% |
| TPU v7 | 950 | 41.2% |
| B300 | 1,150 | 46.0% |
"""),
    "packed weights": (".md", """
| Model | Params | GPUs | Format | VRAM (GB) | tok/s |
|---|---|---|---|---|---|
| Llama | 70B | 1 | GPTQ | 36.2 | 21.0 |
| Llama | 70B | 1 | AWQ | 37.0 | 24.1 |
| Llama | 70B | 1 | Q3_K_M | 31.2 | 15.1 |
| Llama | 70B | 2 | none | 71.0 | 18.1 |
"""),
    "a mean without the first run": (".md", """
Run 1 is warm-up and not in the mean.

| Config | Run 1 | Run 2 | Run 3 | Mean |
|---|---|---|---|---|
| eager | 812.1 | 701.2 | 700.9 | 701.1 |
| compile | 920.4 | 402.1 | 401.8 | 402.0 |
"""),
    "contexts": (".md", """
Llama 7B on 8 H100

| Seq len | tok/s/GPU | TFLOP/s/GPU |
|---|---|---|
| 512 | 10,397 | 445 |
| 1024 | 10,205 | 445 |
| 2048 | 9,842 | 445 |
| 4096 | 9,187 | 445 |
| 8192 | 8,109 | 445 |
| 16384 | 6,567 | 445 |
"""),
    "two references": (".md", """
| Method | GPUs | tok/s | Speedup vs DDP |
|---|---|---|---|
| DDP | 8 | 80,100 | 1.00x |
| FSDP | 8 | 76,100 | 0.95x |
| ours | 8 | 96,100 | 1.20x |
| DDP | 16 | 158,000 | 1.00x |
| FSDP | 16 | 148,500 | 0.94x |
| ours | 16 | 188,000 | 1.19x |
"""),
    "blocks of three": (".md", """
| Model | Mode | Step time (ms) | Speedup |
|---|---|---|---|
| bert | eager | 100.0 | 1.00x |
|  | compile | 76.2 | 1.31x |
|  | compile + flash | 53.5 | 1.87x |
| gpt2 | eager | 210.0 | 1.00x |
|  | compile | 154.2 | 1.36x |
|  | compile + flash | 120.2 | 1.75x |
| t5 | eager | 333.0 | 1.00x |
|  | compile | 220.7 | 1.51x |
|  | compile + flash | 185.6 | 1.79x |
"""),
    "packed samples": (".md", """
| Dataset | Max seq len | samples/s | tokens/s |
|---|---|---|---|
| alpaca | 2048 | 41.2 | 11,120 |
| dolly | 2048 | 33.0 | 12,400 |
| packed | 2048 | 6.2 | 12,700 |
| oasst | 2048 | 19.8 | 12,200 |
"""),
    "a mean of repeats as reference": (".csv", """
gpus,run,tokens_per_sec,speedup
1,0,12010.0,0.998
1,1,12103.0,1.006
1,2,11980.0,0.996
2,0,23600.0,1.962
2,1,23710.0,1.971
2,2,23400.0,1.945
4,0,45200.0,3.757
4,1,45310.0,3.766
4,2,44800.0,3.724
"""),
    "a sheet of data": (".md", """
| GPU | Memory | FP16 TFLOPS | FP8 TFLOPS |
|---|---|---|---|
| A100 | 80 GB | 312 | - |
| H100 | 80 GB | 1,979 | 3,958 |
| B200 | 192 GB | 4,500 | 9,000 |
"""),
    "differences in points": (".md", """
| Metric | Before | After | Change |
|---|---|---|---|
| tok/s | 10,000 | 13,000 | +30% |
| memory (GB) | 62.0 | 41.0 | -34% |
| loss | 3.281 | 3.279 | -0.002 |
| MFU | 38% | 49% | +11 pp |
"""),
    "differences from the first row": (".md", """
| Run | Train loss | Val loss | Δ vs baseline |
|---|---|---|---|
| baseline | 3.281 | 3.310 | - |
| a | 3.270 | 3.301 | -0.009 |
| b | 3.262 | 3.295 | -0.015 |
| c | 3.299 | 3.331 | +0.021 |
"""),
    "experts whose name does not say it": (".md", """
| Model | GPU | tok/s/GPU | MFU |
|---|---|---|---|
| Mixtral-8x7B | H100 | 5,900 | 46% |
| DeepSeek-V3 671B | H800 | 1,850 | 43% |
| Qwen3-30B-A3B | H100 | 17,500 | 33% |
"""),
    # After foundation-model-stack/fms-acceleration (Apache-2.0), scripts/benchmarks/refs/a100_80gb.csv: one model of
    # another length, here of 1,331
    "a model of another length": (".csv", """
model_name_or_path,num_gpus,train_samples_per_second,train_tokens_per_second
bigcode/gpt_bigcode-santacoder,1,8.393,11172.370
bigcode/gpt_bigcode-santacoder,1,8.99,11967.053
bigcode/gpt_bigcode-santacoder,1,8.289,11034.401
bigcode/gpt_bigcode-santacoder,2,12.825,8536.393
bigcode/gpt_bigcode-santacoder,2,15.579,10369.063
bigcode/gpt_bigcode-santacoder,2,12.283,8175.896
mistralai/Mistral-7B-v0.1,1,0.748,3062.694
mistralai/Mistral-7B-v0.1,1,0.767,3143.118
mistralai/Mistral-7B-v0.1,1,0.842,3447.062
mistralai/Mistral-7B-v0.1,2,1.356,2777.18
mistralai/Mistral-7B-v0.1,2,1.469,3008.934
mistralai/Mistral-7B-v0.1,2,1.511,3094.813
mistralai/Mixtral-8x7B-Instruct-v0.1,2,0.767,1571.223
mistralai/Mixtral-8x7B-Instruct-v0.1,2,0.896,1834.376
mistralai/Mixtral-8x7B-Instruct-v0.1,2,0.808,1654.066
mistralai/Mixtral-8x7B-Instruct-v0.1,1,0.373,1528.07
mistralai/Mixtral-8x7B-Instruct-v0.1,1,0.413,1690.27
mistralai/Mixtral-8x7B-Instruct-v0.1,1,0.48,1965.107
NousResearch/Llama-2-70b-hf,2,0.212,433.53
NousResearch/Llama-2-70b-hf,2,0.211,432.434
NousResearch/Llama-2-70b-hf,2,0.234,480.208
NousResearch/Llama-2-70b-hf,1,0.113,464.362
NousResearch/Llama-2-70b-hf,1,0.123,504.611
"""),
    "a mean of rates": (".md", """
| Batch size | Throughput Avg (images/s) | Latency Avg (ms) | Latency 90% (ms) |
|---|---|---|---|
| 1 | 50.0 | 20.00 | 20.9 |
| 2 | 74.0 | 27.03 | 27.1 |
| 4 | 74.0 | 54.05 | 54.1 |
| 8 | 74.0 | 108.11 | 108.2 |
| 16 | 160.0 | 100.00 | 100.1 |
| 32 | 164.0 | 200.00 | 204.1 |
"""),
    "points and a ratio of shares": (".md", """
| | A | B | Difference |
|---|---|---|---|
| Step time | 566.7 ms | 345.8 ms | -39.0% |
| Throughput | 57,826 tok/s | 94,760 tok/s | +63.9% |
| MFU | 33.38% | 54.70% | +21.3 pp |
| MFU / TC active ratio | 1.03x | 1.19x | - |
"""),
    "numbers of seeds": (".csv", """
gpus,seed,tokens_per_sec,speedup,efficiency
1,0,12010.0,1.000,1.000
2,0,23422.5,1.950,0.975
4,0,44426.0,3.699,0.925
1,1,12103.0,1.000,1.000
2,1,23603.8,1.950,0.975
4,1,44770.1,3.699,0.925
1,2,11980.0,1.000,1.000
2,2,23364.0,1.950,0.975
4,2,44315.0,3.699,0.925
"""),
}  # fmt: skip
