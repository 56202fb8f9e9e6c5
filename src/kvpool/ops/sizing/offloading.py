"""Device and host memory with layer-wise prefill offload and with sparse decode offload."""

from __future__ import annotations

from kvpool.ops.sizing.figures import OFFLOAD, OWN, Section
from kvpool.ops.sizing.kv_cache import KvBytes
from kvpool.ops.sizing.plan import Plan
from kvpool.options import Deployment, OptionError
from kvpool.options.amounts import GIB, whole_gib
from kvpool.options.availability import NOT_YET
from kvpool.options.sparse import SECTION, read_sparse

OFFLOADED_DTYPES = ("auto", "bfloat16")
LAYERWISE = "use_layerwise"


def _later(feature: str) -> str:
    return " (not available yet: sizes only)" if feature in NOT_YET else ""


def layerwise_section(kv: KvBytes, plan: Plan) -> Section | None:
    """How little device memory the KV cache takes when layers share buffers; None where no buffers are planned."""
    if plan.layerwise_buffers is None:
        return None
    section = Section(f"Layer-wise prefill offload{_later(LAYERWISE)}")
    layers, buffers = len(kv.shape.layers), plan.layerwise_buffers
    own = layers if plan.layerwise_independent == "all" else len(_independent(plan.layerwise_independent, layers))
    kept = own + min(buffers, layers - own)
    formula = f"(I + min(B, N - I)) / N with N = {layers} layers, I = {own} independent, B = {buffers} shared buffers"
    section.add("layerwise_footprint", kept / layers, "share", formula, f"{OFFLOAD}, 2 (which layers share)")
    section.add("layerwise_capacity_factor", layers / kept, "share", "1 / layerwise_footprint: tokens in the same memory", OWN)
    total = plan.blocks_per_engine * plan.block_size * kv.per_token_rank
    formula = "kv_bytes_on_rank x layerwise_footprint"
    section.add("layerwise_device_bytes", -(-total * kept // layers), "bytes", formula, OWN)
    if not kv.shape.mla:
        section.problem("--layerwise-buffers", "needs an MLA, SFA or DSA model", "leave layerwise_num_shared_buffers out")
    if kept == layers:
        section.warning(
            "--layerwise-buffers", f"nothing is shared among {layers} layers", "set fewer buffers: two to four to start with"
        )
    if plan.pp > 1:
        section.warning("--pp", "the share counts all layers; each pipeline stage has buffers of its own", "size each stage alone")
    return section


def _independent(given: tuple[int, ...] | str, layers: int) -> set[int]:
    """Layer numbers; negative ones count from the end."""
    for layer in given:
        if not -layers <= int(layer) < layers:
            raise OptionError("--layerwise-independent", layer, f"the model has the layers 0 to {layers - 1}")
    return {int(layer) % layers for layer in given}


def sparse_section(kv: KvBytes, plan: Plan) -> Section | None:
    """Device buffer and host pool of sparse decode offload; None where no buffer is planned."""
    if plan.topk_buffer is None:
        return None
    section = Section(f"Sparse decode offload{_later(SECTION)}")
    shape, rows = kv.shape, plan.max_num_seqs or plan.sequences_per_engine
    if (refused := _refusal(kv, plan)) is not None:
        fix = f"set {_next_buffer(kv, plan)}" if refused.key == "topk_buffer_size" else "see the sparse guide, 3 and 5"
        section.problem("--topk-buffer", str(refused), fix)
    layers, source = len(shape.layers), f"{OFFLOAD}, 3"
    hot = layers * rows * plan.topk_buffer * kv.main
    section.add("hot_buffer_bytes", hot, "bytes", f"{layers} layers x {rows} rows x {plan.topk_buffer} x {kv.main} a token", OWN)
    device = sum(shape.indexers) * kv.indexer
    formula = f"{sum(shape.indexers)} indexers x {kv.indexer}: what stays on the device of each token"
    section.add("device_bytes_per_token", device, "bytes", formula, OWN)
    host = plan.blocks_per_engine * plan.block_size * kv.main * layers
    formula = (
        f"{plan.blocks_per_engine} blocks x {plan.block_size} x {kv.main} x {layers} layers, shared by the TP ranks of a DP rank"
    )
    section.add("host_pool_bytes", host, "bytes", formula, source)
    section.add("dram_size_per_dp_GB", whole_gib(host), "GB", "host_pool_bytes up to whole GiB", source)
    if plan.dram_per_dp is not None and host > plan.dram_per_dp * GIB:
        text = f"the host pool must hold the full KV cache, {host} bytes, but gets {plan.dram_per_dp} GB"
        section.problem("--dram-per-dp", text, f"set dram_size_per_dp_GB to {whole_gib(host)}, or fewer sequences")
    section.add(
        "remote_d2h_ports", plan.dp * plan.tp, "count", f"{plan.dp} DP x {plan.tp} TP consecutive ports from kv_port on", source
    )
    return section


def _refusal(kv: KvBytes, plan: Plan) -> OptionError | None:
    """What the options' own rules say of these values."""
    kv_dtype = "bfloat16" if plan.kv_dtype in OFFLOADED_DTYPES else plan.kv_dtype
    deployment = Deployment(
        tp=plan.tp,
        pp=plan.pp,
        dp=plan.dp,
        mla=kv.shape.mla,
        index_topk=kv.shape.index_topk,
        block_size=plan.block_size,
        kv_dtype=kv_dtype,
        model_type=kv.shape.model_type,
    )
    settings = {"enabled": True, "topk_buffer_size": plan.topk_buffer}
    try:
        read_sparse({SECTION: settings}, "kv_consumer", deployment)
    except OptionError as error:
        return error
    return None


def _next_buffer(kv: KvBytes, plan: Plan) -> int:
    """Twice index_topk, in whole blocks: a good start."""
    return -(-2 * kv.shape.index_topk // plan.block_size) * plan.block_size
