"""How the options of AscendStoreConnector depend on one another, on the role and on the deployment."""

from __future__ import annotations

from kvpool.options.ascend_store import AscendStoreOptions
from kvpool.options.availability import refuse_unavailable
from kvpool.options.deployment import Deployment
from kvpool.options.errors import OptionError

ROLES = ("kv_both", "kv_producer", "kv_consumer")
POLICIES = ("recompute", "fail")
LAYERWISE_STORES = ("local", "mooncake", "memcache")


def check_role(role: object, where: str = "") -> str:
    """The role, which vLLM requires wherever a connector is set."""
    if role is None:
        raise OptionError("kv_role", None, f"is required: one of {', '.join(ROLES)}", where=where)
    if role not in ROLES:
        raise OptionError("kv_role", role, f"expected one of {', '.join(ROLES)}", where=where)
    return str(role)


def check_policy(policy: object, where: str = "") -> str:
    """The effective load failure policy; absent is vLLM's default, fail."""
    if policy is None:
        return "fail"
    if policy not in POLICIES:
        raise OptionError("kv_load_failure_policy", policy, 'expected "recompute" or "fail"', where=where)
    return str(policy)


def check_dependencies(options: AscendStoreOptions, given: set[str], kv_role: str, deployment: Deployment, where: str) -> list[str]:
    """OptionError for the first contradiction; warnings for options without effect. ``given`` are the fields that were written."""
    _check_partition(options, deployment, where)
    _check_times(options, where)
    warnings = _without_effect(options, given, kv_role) + _tensor_parallel(options, kv_role, deployment)
    if options.fault_plan_path is not None:
        warnings.append("fault_plan_path makes the store fail on purpose: it is for tests only")
    if options.backend == "local" and (deployment.hosts or 1) > 1:
        warnings.append(f"the local backend is a pool of one host: {deployment.hosts} hosts have one each, and share nothing")
    if deployment.hybrid and "load_async" in given and not options.load_async:
        warnings.append("load_async=false has no effect: models with several kinds of KV cache always load in the background")
    if options.use_layerwise:
        _check_layerwise(options, given, kv_role, deployment, where)
        if options.load_async:
            warnings.append("load_async has no effect with use_layerwise")
    elif unused := sorted(field for field in given if field.startswith("layerwise_")):
        warnings.append(f"{', '.join(unused)}: no effect without use_layerwise")
    return warnings


def _check_partition(options: AscendStoreOptions, deployment: Deployment, where: str) -> None:
    partition = options.prefill_pp_layer_partition
    if partition is None:
        return
    shown = ",".join(map(str, partition))
    if len(partition) != options.prefill_pp_size:
        reason = f"names {len(partition)} stages, but prefill_pp_size is {options.prefill_pp_size}"
        raise OptionError("prefill_pp_layer_partition", shown, reason, where=where)
    if deployment.num_layers is not None and sum(partition) != deployment.num_layers:
        reason = f"adds up to {sum(partition)} layers, but the model has {deployment.num_layers}"
        raise OptionError("prefill_pp_layer_partition", shown, reason, where=where)


def _check_times(options: AscendStoreOptions, where: str) -> None:
    if options.lease_ms <= options.load_timeout_ms:
        reason = f"must be longer than load_timeout_ms={options.load_timeout_ms}, or hits could be evicted while they load"
        raise OptionError("lease_ms", options.lease_ms, reason, where=where)
    if options.lookup_wait_ms > options.lookup_timeout_ms:
        reason = f"must not be longer than lookup_timeout_ms={options.lookup_timeout_ms}"
        raise OptionError("lookup_wait_ms", options.lookup_wait_ms, reason, where=where)


def _without_effect(options: AscendStoreOptions, given: set[str], kv_role: str) -> list[str]:
    warnings = []
    consumer = kv_role == "kv_consumer"
    if "discard_partial_chunks" in given:
        warnings.append("discard_partial_chunks has no effect: partial blocks are never stored")
    if options.h2d_stagger_us:
        warnings.append("h2d_stagger_us has no effect: loads are not staggered")
    if options.ascend_local_comm_res_path and options.backend == "local":
        warnings.append("ascend_local_comm_res_path has no effect with the local backend")
    for name in ("consumer_is_to_put", "consumer_is_to_load"):
        if getattr(options, name) and not consumer:
            warnings.append(f"{name} has no effect on a {kv_role}")
    if consumer and options.save_decode_cache:
        warnings.append("save_decode_cache has no effect on a kv_consumer: consumer_is_to_put stores what it computes")
    if consumer and not (options.consumer_is_to_put or options.consumer_is_to_load):
        warnings.append(
            "this kv_consumer neither loads from the pool nor stores into it: set consumer_is_to_load or consumer_is_to_put"
        )
    if (options.prefill_pp_size > 1) and not (consumer and options.consumer_is_to_put):
        warnings.append("prefill_pp_size and prefill_pp_layer_partition have no effect without consumer_is_to_put on a kv_consumer")
    return warnings


def _tensor_parallel(options: AscendStoreOptions, kv_role: str, deployment: Deployment) -> list[str]:
    """Warnings about sizes that differ between the sides, do nothing, or are not those of this engine."""
    prefill, decode = options.prefill_tp_size, options.decode_tp_size
    stores_for_prefill = kv_role == "kv_consumer" and options.consumer_is_to_put
    warnings = []
    if prefill and decode and prefill != decode and not (stores_for_prefill and prefill % decode == 0):
        warnings.append(
            "prefill_tp_size and decode_tp_size differ: models with several KV heads then share nothing between the sides, "
            "unless a kv_consumer with consumer_is_to_put stores for prefill"
        )
    elif (prefill or decode) and not stores_for_prefill:
        warnings.append("prefill_tp_size and decode_tp_size have no effect without consumer_is_to_put on a kv_consumer")
    elif stores_for_prefill and decode and not prefill:
        warnings.append("decode_tp_size has no effect without prefill_tp_size: what is stored is cut for prefill's ranks")
    own, name = {"kv_producer": (prefill, "prefill_tp_size"), "kv_consumer": (decode, "decode_tp_size")}.get(kv_role, (None, ""))
    if own and deployment.tp and own != deployment.tp:
        warnings.append(f"{name}={own}, but this engine runs with a tensor parallel size of {deployment.tp}")
    return warnings


def _check_layerwise(options: AscendStoreOptions, given: set[str], kv_role: str, deployment: Deployment, where: str) -> None:
    def refuse(reason: str, key: str = "use_layerwise", value: object = True) -> OptionError:
        return OptionError(key, value, reason, where=where)

    if kv_role == "kv_consumer":
        raise refuse("works on a kv_producer or kv_both only")
    if options.backend not in LAYERWISE_STORES:
        raise refuse(f"does not work with the {options.backend} backend; these can: {', '.join(LAYERWISE_STORES)}")
    if deployment.context_parallel:
        raise refuse("does not work with context parallelism")
    if options.prefill_tp_size and options.decode_tp_size and options.prefill_tp_size != options.decode_tp_size:
        raise refuse("does not work with a prefill_tp_size that differs from decode_tp_size")
    layers = options.layerwise_independent_layers
    count = deployment.num_layers
    if count is not None and layers != "all" and any(not -count <= int(layer) < count for layer in layers):
        raise refuse(f"the model has {count} layers", "layerwise_independent_layers", list(layers))
    if not shares_buffers(options, deployment):
        return
    key, value = "layerwise_num_shared_buffers", options.layerwise_num_shared_buffers
    if kv_role != "kv_producer":
        raise refuse("sharing buffers works on a kv_producer only, since decoding needs every layer at hand", key, value)
    if deployment.mla is False:
        raise refuse("sharing buffers needs a model with MLA, SFA or DSA attention", key, value)
    if deployment.eager is False:
        raise refuse("sharing buffers needs --enforce-eager", key, value)


def shares_buffers(options: AscendStoreOptions, deployment: Deployment) -> bool:
    """True where layers share device buffers: layer-wise, fewer buffers than layers that could share (as far as known)."""
    buffers, layers = options.layerwise_num_shared_buffers, options.layerwise_independent_layers
    if not options.use_layerwise or buffers is None or layers == "all":
        return False
    if deployment.num_layers is None:
        return True
    own = {int(layer) % deployment.num_layers for layer in layers}
    return buffers < deployment.num_layers - len(own)


def refuse_later_work(options: AscendStoreOptions, deployment: Deployment, where: str) -> None:
    """NotAvailableError for valid options of later versions."""
    if options.use_layerwise:
        refuse_unavailable("use_layerwise", "use_layerwise", True, where)
