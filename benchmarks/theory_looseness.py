"""Measure how loose the bounds of docs/theory.md are on the queries and keys of a real model.

    python benchmarks/theory_looseness.py --model smollm2-135m-instruct \
        --text-file "$PREHOC_DATA/wikitext2/wiki.test.raw" --out benchmarks/theory_looseness.json

Plain transformers runs the dense model over windows of a real text; the last `--steps` queries of each window stand for
decode steps (teacher forcing makes them the same numbers). Every comparison is done per query head in float64.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from prehoc import mass

SINK, LOCAL, BLOCK, TAU, RADIUS = 8, 32, 8, 0.8, 1
captured: list[tuple[Tensor, Tensor, Tensor, float]] = []


def capture(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    """Keep a layer's rotated q, k and its v, then attend as usual."""
    captured.append((query[0], key[0], value[0], kwargs["scaling"]))
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


class Pool:
    """Numbers gathered by name over layers, heads and steps, and their summary."""

    def __init__(self) -> None:
        self.values: dict[str, list[Tensor]] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Append a tensor of any shape."""
        self.values.setdefault(name, []).append(torch.as_tensor(value).flatten().double())

    def get(self, name: str) -> np.ndarray:
        """All numbers of one name."""
        return torch.cat(self.values[name]).numpy()

    def summary(self, name: str) -> dict[str, float]:
        """Count, mean, quantiles and largest value."""
        x = self.get(name)
        q = np.quantile(x, [0.1, 0.5, 0.9])
        names = ("n", "mean", "p10", "median", "p90", "max")
        return dict(zip(names, [x.size, *(float(f"{v:.4g}") for v in (x.mean(), *q, x.max()))], strict=True))


def top(scores: Tensor, k: int) -> Tensor:
    """Exact top-k of the last axis; ties have probability zero here."""
    return scores.topk(min(k, scores.shape[-1]), dim=-1).indices


def truncation(pool: Pool, q: Tensor, k: Tensor, v: Tensor, scale: float, critical: int | None, name: str) -> None:
    """Propositions 1 to 4: the oracle set (or sinks and window alone) against full attention, step by step."""
    heads, steps, length = q.shape[0], q.shape[1], k.shape[1]
    full, kept = torch.zeros(heads, steps, length).double(), torch.zeros(heads, steps, length).double()
    values = v.repeat_interleave(heads // v.shape[0], dim=0)
    deltas = []
    for step in range(steps):
        seen = length - steps + step + 1
        weights = mass.attention_weights(q[None, :, step], k[None, :, :seen], scale)
        fixed = torch.cat([torch.arange(SINK), torch.arange(seen - LOCAL, seen)]).expand(1, heads, -1)
        indices = fixed
        if critical is not None:
            indices = torch.cat([fixed, top(weights[..., SINK : seen - LOCAL], critical) + SINK], dim=-1)
        delta, truncated = mass.dropped_mass(weights, indices), mass.truncated_weights(weights, indices)
        pool.add(f"{name}/tv_error", (0.5 * (weights - truncated).abs().sum(-1) - delta).abs())
        output = torch.einsum("hl,hld->hd", weights[0], values[:, :seen])
        moved = torch.einsum("hl,hld->hd", (weights - truncated)[0], values[:, :seen]).norm(dim=-1)
        for centre, at in (("mean", None), ("zero", torch.zeros(()))):
            bound = mass.output_error_bound(delta, mass.vector_radius(v[None, :, :seen], at))[0]
            pool.add(f"{name}/output_change_over_bound_{centre}", moved / bound)
            pool.add(f"{name}/output_bound_{centre}_over_output_norm", bound / output.norm(dim=-1))
        pool.add(f"{name}/output_change_over_output_norm", moved / output.norm(dim=-1))
        pool.add(f"{name}/delta", delta)
        deltas.append(delta[0])
        full[:, step, :seen], kept[:, step, :seen] = weights[0], truncated[0]
    mean_delta = torch.stack(deltas).mean(0)
    change = (mass.routing_information(full) - mass.routing_information(kept)).abs()
    ceiling = min(np.log(length), np.log(steps))
    bounds = {
        "information_bound": mass.information_bound(mean_delta, length, steps),
        "information_bound_steps": mass.information_bound_steps(mean_delta, length, steps),
    }
    pool.add(f"{name}/information_full", mass.routing_information(full))
    pool.add(f"{name}/information_change", change)
    for key, bound in bounds.items():
        assert (change <= bound + 1e-9).all()
        pool.add(f"{name}/{key}", bound)
        pool.add(f"{name}/{key}_is_clipped", bound >= ceiling - 1e-12)


def sharing(pool: Pool, q: Tensor, k: Tensor, scale: float, critical: int, name: str) -> None:
    """Propositions 5 and 6: each anchor against the later queries of its block that pass the gate."""
    heads, steps, length = q.shape[0], q.shape[1], k.shape[1]
    zero = torch.zeros(())
    for first in range(0, steps, BLOCK):
        anchor = length - steps + first + 1  # keys the anchor sees
        middle = slice(SINK, anchor - LOCAL)
        q0 = q[None, :, first]
        old = mass.attention_weights(q0, k[None, :, :anchor], scale)
        b0 = old[..., middle] / old[..., middle].sum(-1, keepdim=True)
        chosen = top(b0, critical)  # best first
        neighbours = (chosen[..., : critical // 3, None] + torch.arange(-RADIUS, RADIUS + 1)).flatten(-2)
        inside_middle = (neighbours >= 0) & (neighbours < b0.shape[-1])
        neighbours = (neighbours + SINK).where(inside_middle, -1)
        for step in range(first + 1, min(first + BLOCK, steps)):
            q1, now = q[None, :, step], length - steps + step + 1
            cosine = torch.cosine_similarity(q0, q1, dim=-1)
            passes = cosine > TAU
            today = mass.attention_weights(q1, k[None, :, :now], scale)
            on_old = today[..., :anchor] / today[..., :anchor].sum(-1, keepdim=True)
            middle_mass = today[..., middle].sum(-1)
            b1 = today[..., middle] / middle_mass[..., None]
            logits = (
                (q1 - q0).reshape(1, k.shape[0], -1, k.shape[2]) @ k[None, :, middle].transpose(-1, -2) * scale
            ).flatten(1, 2)
            everything, inside = k[None, :, :anchor], k[None, :, middle]
            change, change_middle = (on_old - old).abs().sum(-1), (b1 - b0).abs().sum(-1)
            bounds = {
                "linear_kmax": mass.lipschitz_bound(q0, q1, mass.vector_radius(everything, zero), scale),
                "linear_centred": mass.lipschitz_bound(q0, q1, mass.vector_radius(everything), scale),
                "tanh_centred": mass.attention_change_bound(q0, q1, mass.vector_radius(everything), scale),
                "tanh_centred_middle": mass.attention_change_bound(q0, q1, mass.vector_radius(inside), scale),
                "tanh_logit_range_middle": 2 * torch.tanh((logits.amax(-1) - logits.amin(-1)) / 4),
                "true_change_middle": change_middle,
            }
            printed = 2 * mass.vector_radius(everything, zero).repeat_interleave(heads // k.shape[0], -1) * scale
            printed = printed * (2 - 2 * cosine).clamp(min=0).sqrt()
            pool.add(f"{name}/cosine_passes", passes)
            pool.add(f"{name}/norm_of_q", q1[passes].norm(dim=-1))
            pool.add(f"{name}/change", change[passes])
            pool.add(f"{name}/change_middle", change_middle[passes])
            pool.add(f"{name}/change_over_printed_form", (change / printed)[passes])
            pool.add(f"{name}/middle_mass", middle_mass[passes])
            pool.add(f"{name}/new_mass", today[..., anchor:].sum(-1)[passes])
            ours = torch.cat([torch.arange(SINK), torch.arange(anchor - LOCAL, now)]).expand(1, heads, -1)
            theirs = torch.cat([torch.arange(SINK), torch.arange(now - LOCAL, now)]).expand(1, heads, -1)
            oracle = torch.cat([theirs, top(today[..., SINK : now - LOCAL], critical) + SINK], -1)
            best = mass.retained_mass(today, oracle)
            lost = best - mass.retained_mass(today, torch.cat([ours, chosen + SINK], -1))
            dilated = best - mass.retained_mass(today, torch.cat([ours, chosen + SINK, neighbours], -1))
            pool.add(f"{name}/loss", lost[passes])
            pool.add(f"{name}/loss_dilated", dilated[passes])
            for key, bound in bounds.items():
                assert (lost <= bound + 1e-9).all(), key
                assert (change_middle <= bound + 1e-9).all(), key
                loss_bound = mass.shared_loss_bound(bound, middle_mass)
                assert (lost <= loss_bound + 1e-9).all()
                pool.add(f"{name}/{key}", bound[passes])
                pool.add(f"{name}/{key}_says_nothing", (bound >= 2 - 1e-3)[passes])
                pool.add(f"{name}/loss_bound_{key}", mass.shared_loss_bound(bound)[passes])
                pool.add(f"{name}/loss_bound_{key}_middle_mass", loss_bound[passes])


def machine() -> str:
    """Name the processor, without naming the machine."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{model}, {torch.get_num_threads()} threads, {platform.system()}"


def main() -> None:
    """Run the measurement and write the JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="catalogue name (prehoc pull) or local folder")
    parser.add_argument("--text-file", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompt-tokens", type=int, default=2976)
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--windows", type=int, default=2)
    args = parser.parse_args()
    folder = args.model
    if not Path(folder).is_dir():
        from prehoc.models import pull

        folder = str(pull(folder))
    transformers.AttentionInterface.register("prehoc_capture", capture)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="prehoc_capture")
    raw = args.text_file.read_bytes()
    ids = tokenizer(raw.decode("utf-8"), return_tensors="pt").input_ids[0]
    size, pool = args.prompt_tokens + args.steps, Pool()
    if len(ids) < size * args.windows:
        sys.exit(f"the text has {len(ids)} tokens, {args.windows} windows need {size * args.windows}: lower --windows")
    with torch.inference_mode():
        for window in range(args.windows):
            captured.clear()
            start = window * (len(ids) // args.windows)
            model(ids[None, start : start + size], logits_to_keep=1)
            for layer, (q, k, v, scale) in enumerate(captured):
                print(f"window {window}, layer {layer}", file=sys.stderr)
                q, k, v = q[:, -args.steps :].double(), k.double(), v.double()
                for budget in (128, 1024):
                    critical = budget - SINK - LOCAL
                    truncation(pool, q, k, v, scale, critical, f"oracle_{budget}")
                    sharing(pool, q, k, scale, critical, f"shared_{budget}")
                truncation(pool, q, k, v, scale, None, "sink_local_40")
    violated = {n: float((pool.get(n) > 1).mean()) for n in pool.values if n.endswith("over_printed_form")}
    name = Path(args.model).name
    document = {
        "command": f"python benchmarks/theory_looseness.py --model {name} "
        f'--text-file "$PREHOC_DATA/{args.text_file.parent.name}/{args.text_file.name}" '
        f"--prompt-tokens {args.prompt_tokens} --steps {args.steps} --windows {args.windows} "
        "--out benchmarks/theory_looseness.json",
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
        "text_sha256": hashlib.sha256(raw).hexdigest(),
        "setting": {"sink": SINK, "local": LOCAL, "block_size": BLOCK, "tau": TAU, "radius": RADIUS, "m": "k // 3"},
        "printed_form_violated_share": violated,
        "results": {n: pool.summary(n) for n in sorted(pool.values)},
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
