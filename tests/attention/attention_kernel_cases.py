"""Cases that attention's kernels are checked on, in addition to those for every backend."""

from onchip.ops.attention.cases import CHECK_CASES, KINDS, AttentionCase

STOPS = "tree", "shared prompt", "sink tokens and window"
"""Masks with a `stop`."""

# The kernels' tiles have 128 tokens.
KERNEL_CASES = (
    *(x for x in CHECK_CASES if x.mask != "blocked" and x.size % 8 == x.value_size % 8 == 0 < x.queries * x.keys),
    *(
        AttentionCase(f"{name}, several tiles", name, queries=700, keys=700, heads=2, key_heads=1, size=64,
                      value_size=64)
        for name in KINDS
        if name != "blocked"
    ),
    *(
        AttentionCase(f"{q} and {k} tokens, {mask}", mask, batch=2, queries=q, keys=k, heads=2, key_heads=2, size=64,
             value_size=64)
        for q, k in ((1, 1), (239, 1), (799, 3), (113, 203), (1023, 1024), (128, 128), (129, 257))
        for mask in ("causal", "causal, last sees last", "full")
    ),
    *(
        AttentionCase(f"a head of {size}", "causal documents", queries=300, keys=300, size=size, value_size=size,
                      sinks=True)
        for size in range(8, 129, 8)
    ),
    *(
        AttentionCase(f"{q} and {k} tokens, a head of {size}, {mask}", mask, queries=q, keys=k, heads=6, key_heads=2,
                      size=size, value_size=values, sinks=size % 16 == 0)
        for size, values, q, k in ((72, 72, 300, 300), (80, 128, 129, 257), (128, 96, 799, 3), (128, 128, 1, 1),
                                   (104, 104, 113, 203), (40, 120, 63, 65), (128, 128, 1023, 1024))
        for mask in ("causal, last sees last", "full")
    ),
    *(
        AttentionCase(f"groups of {group}, causal", "causal", queries=520, keys=520, heads=2 * group, key_heads=2,
                      size=128, value_size=128, sinks=True)
        for group in (1, 3, 5, 8)
    ),
    *(
        AttentionCase(f"groups of {group}", "window in documents", queries=520, keys=520, heads=2 * group, key_heads=2,
             size=size, value_size=size, sinks=True)
        for group in (1, 3, 5, 7, 8)
        for size in (64, 128)
    ),
    *(
        AttentionCase(f"softcap {cap}, {size}, {mask}", mask, queries=300, keys=300, size=size, value_size=size,
                      std=std, sinks=True, options={"softcap": cap})
        for size in (64, 128)
        for cap, std, mask in ((10.0, 4.0, "causal"), (50.0, 2.0, "sink tokens and window"))
    ),
    *(
        AttentionCase(f"{name}, wide heads", name, batch=1, queries=700, keys=700, heads=4, key_heads=2, size=192,
                      value_size=128, sinks=i % 2 == 0, options={"softcap": 10.0} if i % 2 == 0 else {})
        for i, name in enumerate(KINDS)
        if name != "blocked"
    ),
    *(
        AttentionCase(f"a head of {size} and {values}", "causal documents" if q == k else "causal, last sees last",
                      queries=q, keys=k, heads=6, key_heads=2, size=size, value_size=values)
        for size, values, q, k in ((136, 72, 300, 300), (144, 128, 129, 257), (160, 8, 1, 1), (192, 64, 799, 3),
                                   (184, 120, 113, 203))
    ),
    *(
        AttentionCase(f"{name}, widest heads", name, batch=1, queries=700, keys=700, heads=4, key_heads=2, size=256,
                      value_size=256, sinks=i % 2 == 0, options={"softcap": 10.0} if i % 2 == 0 else {})
        for i, name in enumerate(KINDS)
        if name != "blocked"
    ),
    *(
        AttentionCase(f"a head of {size} and {values}", "causal documents" if q == k else "causal, last sees last",
                      queries=q, keys=k, heads=6, key_heads=2, size=size, value_size=values)
        for size, values, q, k in ((200, 72, 300, 300), (256, 64, 129, 257), (256, 256, 1, 1), (64, 256, 799, 3),
                                   (192, 136, 113, 203), (248, 240, 1, 700), (208, 256, 63, 65))
    ),
    AttentionCase("large scores, widest heads", "causal", queries=300, keys=300, size=256, value_size=256, std=2.0),
    AttentionCase("wider values", "causal", queries=200, keys=200, size=64, value_size=128),
    AttentionCase("narrower values", "causal", queries=200, keys=200, size=128, value_size=40),
    AttentionCase("many keys", "causal", batch=1, queries=2500, keys=2500, heads=2, key_heads=1, size=128,
                  value_size=128),
    AttentionCase("many keys, wide heads", "causal", batch=1, queries=2500, keys=2500, heads=2, key_heads=1, size=192,
                  value_size=128),
    AttentionCase("many keys, widest heads", "causal", batch=1, queries=2500, keys=2500, heads=2, key_heads=1, size=256,
                  value_size=256),
    AttentionCase("many documents", "causal documents", batch=3, queries=2500, keys=2500, heads=2, key_heads=1, size=64,
         value_size=64),
)  # fmt: skip
