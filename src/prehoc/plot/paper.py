"""What the paper (arXiv 2602.08329) reports, to stand beside our numbers, and the figures and tables that a report answers."""

from __future__ import annotations

PARTS = {  # a figure or table of the paper: what it shows, and what a report needs for ours
    "Figure 2/11": ("critical indices of neighbouring queries", "a trace with --record qk"),
    "Figure 3": ("attention maps", "a trace with --record qk"),
    "Figure 4": (
        "overlap of a shared set with the next queries' critical keys",
        "a trace of a method that shares, such as cis",
    ),
    "Figure 5": ("which keys are read", "a trace with --record selections"),
    "Figure 6": (
        "accuracy, gap of retained mass and overlap over the retrieval ratio",
        "prehoc tune cis, or prehoc eval",
    ),
    "Figure 7": (
        "information change against its bound",
        "benchmarks/theory_looseness.json, or a trace with selections and qk",
    ),
    "Figure 8": ("ratio of the query norms of sharing pairs", "a trace with --record qk of a method that shares"),
    "Figure 9": ("sensitivity to dilation and tau", "prehoc tune cis"),
    "Figure 10": ("cosine of consecutive queries", "a trace"),
    "Figure 12": ("accuracy over the budget", "prehoc eval with several budgets"),
    "Table II": ("GSM8K and CoQA", "prehoc eval of gsm8k or coqa"),
    "Table III": ("LongBench v2", "prehoc eval of longbench2"),
    "Table IV": ("time of the attention operator", "prehoc bench attention"),
    "Table V": ("decode throughput", "prehoc bench decode"),
    "Tables VI/VII": ("controls", "benchmarks/rivals.py, or prehoc eval with the controls"),
    "Table VIII": ("tuning", "prehoc tune cis at a budget of 128, or tune prefill"),
    "Table IX": ("gates by keys or hidden states", "benchmarks/rivals.py, or prehoc eval, with cis_key or cis_hidden"),
    "Pareto": ("mass or accuracy against bytes and time", "prehoc eval, bench decode, tune cis or rivals"),
}
COLUMNS = ("Flash", "Flex-BS", "H2O", "Quest", "DS", "HShare-0", "CIS-8", "CIS-16", "CPE-8", "CPE-16")
OURS = {  # our names of its columns
    "sdpa": "Flash",
    "flex": "Flex-BS",
    "h2o": "H2O",
    "quest": "Quest",
    "double_sparsity": "DS",
    "hshare-0": "HShare-0",
    "cis-8": "CIS-8",
    "cis-16": "CIS-16",
    "cpe-8": "CPE-8",
    "cpe-16": "CPE-16",
}
ATTENTION_MS = {  # Table IV: (batch, length)
    (8, 2048): (0.830, 0.119, 0.093, 0.460, 0.241, 0.160, 0.147, 0.106, 0.144, 0.095),
    (8, 4096): (1.630, 0.560, 0.470, 0.850, 0.733, 0.570, 0.534, 0.501, 0.506, 0.469),
    (8, 16384): (7.140, 2.500, 2.080, 3.420, 3.160, 2.430, 2.280, 2.250, 2.220, 2.110),
    (16, 2048): (1.630, 0.200, 0.110, 0.770, 0.422, 0.230, 0.214, 0.178, 0.196, 0.165),
    (16, 4096): (3.230, 1.000, 0.850, 2.210, 1.350, 1.041, 0.953, 0.869, 0.904, 0.821),
    (16, 16384): (14.220, 4.550, 4.040, 10.030, 5.940, 4.850, 4.430, 4.130, 4.270, 3.910),
}
DECODE_TOKENS = {  # Table V; its first column is GPT-Fast, a dense engine
    (8, 2048): (188, 228, 234, 206, 213, 222, 216, 224, 225, 233),
    (8, 4096): (118, 210, 228, 152, 201, 214, 216, 220, 219, 227),
    (8, 16384): (33, 80, 92, 59, 68, 83, 86, 87, 88, 91),
    (16, 2048): (233, 408, 416, 287, 360, 398, 402, 415, 412, 421),
    (16, 4096): (136, 338, 396, 175, 286, 350, 352, 364, 362, 384),
    (16, 16384): (34, 99, 112, 47, 79, 95, 102, 108, 105, 114),
}
SCORES = {  # Tables II (LLaMA2-7B-chat, budget 128) and III (LongBench v2, Qwen2.5-7B; easy, hard), x 100
    "gsm8k": {
        "flexible": {"dense": 22.97, "h2o": 9.86, "quest": 4.78, "hshare-1": 18.03, "hshare-2": 15.24, "cis": 18.42},
        "strict": {"dense": 22.97, "h2o": 1.44, "quest": 4.62, "hshare-1": 17.03, "hshare-2": 11.45, "cis": 18.27},
    },
    "coqa": {
        "em": {"dense": 59.97, "h2o": 49.52, "quest": 57.13, "hshare-1": 58.98, "hshare-2": 56.72, "cis": 60.85},
    },
    "longbench2": {
        "easy": {"dense": 30.2, "quest": 15.8, "hshare-1": 19.8, "cis": 29.7, "cpe": 26.6},
        "hard": {"dense": 32.5, "quest": 22.9, "hshare-1": 23.2, "cis": 30.9, "cpe": 33.4},
    },
    "longbench2_cot": {
        "easy": {"dense": 37.5, "quest": 21.3, "hshare-1": 28.6, "cis": 35.4, "cpe": 31.8},
        "hard": {"dense": 28.3, "quest": 26.5, "hshare-1": 28.0, "cis": 29.6, "cpe": 32.8},
    },
}
TABLES = {"gsm8k": "Table II", "coqa": "Table II", "longbench2": "Table III", "longbench2_cot": "Table III"}
CONTROLS = {  # Tables VI and VII: beta at about 1,060 keys and a retrieval ratio of 10 %, and GSM8K of VI x 100
    "hshare_matched": (0.061, 0.069, 70.02),
    "direct_reuse": (0.022, 0.021, 79.07),
    "random_expansion": (0.041, 0.036, 71.87),
    "cis": (0.019, 0.018, 80.07),
}
GATES = {  # Table IX: score x 100 with blocks of 8 and of 16
    "key": (15.47, 14.05),
    "hidden": (13.03, 11.21),
}
TUNING = {  # Table VIII, LLaMA2-7B-chat: (block size, tau, radius): retrieval ratio, keys, GSM8K x 100
    (4, 0.8, 1): (0.301, 124, 18.34),
    (8, 0.7, 1): (0.152, 131, 18.01),
    (8, 0.8, 2): (0.184, 167, 16.53),
    (32, 0.8, 1): (None, 136, 16.93),
}
PSAW_PERPLEXITY = {(0.5, 1.0): 6.120, (0.7, 1.5): 6.113}  # Table VIII, WikiText


def column(name: str) -> int | None:
    """Return which of `COLUMNS` one of our rows answers, None if none does."""
    short = name.split(":")[0].split(" ")[0]
    short = "sdpa" if short.startswith("sdpa") else short
    return COLUMNS.index(OURS[short]) if short in OURS else None
