"""From `SageConfig.kv` to the plug-in that runs the tiers, and what must be refused before a model is loaded for it."""

from pathlib import Path

from sagellm.core.config import KVConfig, PluginSpec, SageConfig
from sagellm.core.errors import ConfigError
from sagellm.core.hooks import Tier
from sagellm.engines.base import KVCacheSchema
from sagellm.engines.lmdeploy.sizing import Sizes

TIERED = "sagellm.kv_runtime.plugin:TieredKV"
SCHEMA_FILE = "kv_schema.json"  # of the blocks in the folder of a disk tier
TIERED_WITH_DISK = "sagellm.kv_runtime.plugin:TieredKVWithDisk"


def tier_plugins(config: SageConfig) -> list[PluginSpec]:
    """The one that the tiers need, if there are any."""
    if config.kv is None:
        return []
    name = TIERED if config.kv.disk is None else TIERED_WITH_DISK
    return [PluginSpec(name=name, options=config.kv.model_dump(mode="json"), required=True)]


def check_tier_settings(config: SageConfig) -> None:
    """Refuse what would end the engine process after the model is loaded, or serve without a word of it.

    Raises:
        ConfigError: tiers that this engine cannot have with these settings, or quotas of tiers that are not there.
        PolicyError: an unknown policy, or options that it does not take.
        TierError: a disk folder that cannot be used, or that another server uses.
    """
    kv = config.kv
    if kv is None:
        return
    if not config.prefix_caching:
        raise ConfigError("kv: the tiers hold cached prefixes, and prefix_caching is off; switch it on, or leave kv out.")
    if not config.host_kv_blocks:
        _refuse_unused(kv, "cpu_", "there is no host tier; give --host-kv-blocks")
        _refuse_unused(kv, "migration", "there is no tier to move blocks to; give --host-kv-blocks")
    if kv.disk is None:
        _refuse_unused(kv, "disk_", "there is no disk tier; give --kv-disk")
        _refuse_unused(kv, "deadline_s", "there is no disk tier, whose saves and loads it bounds; give --kv-disk")
    else:
        _check_disk(config, kv, kv.disk)
    _check_policies(config, kv)


def _refuse_unused(kv: KVConfig, prefix: str, why: str) -> None:
    fields = {name: field for name, field in KVConfig.model_fields.items() if name.startswith(prefix)}
    for name, field in fields.items():
        if getattr(kv, name) != field.get_default(call_default_factory=True):
            raise ConfigError(f"kv.{name} {getattr(kv, name)}: {why}, or leave it out.")


def _check_disk(config: SageConfig, kv: KVConfig, folder: Path) -> None:
    if not config.host_kv_blocks:
        raise ConfigError(
            f"kv.disk {folder}: blocks come to the disk and back through the host tier, and host_kv_blocks is 0; "
            "give --host-kv-blocks, a few hundred or more."
        )
    if config.tensor_parallel > 1:
        raise ConfigError(
            f"kv.disk {folder}: with tensor_parallel {config.tensor_parallel} each worker process has a part of every block, "
            "which the engine cannot read; use --tensor-parallel 1, or leave the disk tier out."
        )
    longest_s = config.hold_limit_s - 1  # the answer that it is late takes a moment
    if kv.deadline_s > longest_s:
        raise ConfigError(
            f"kv.deadline_s {kv.deadline_s:g}: a request that waits for its blocks for so long would be taken for a fault of "
            f"the tiers, and they be switched off; give at most {longest_s:g} (--kv-deadline)."
        )
    from sagellm.kv_runtime.disk_store_folder import LockedFolder

    LockedFolder(folder).close()  # the engine process opens it again


def _check_policies(config: SageConfig, kv: KVConfig) -> None:
    from sagellm.kv_policy.registry import make_migration_policy, make_policy

    pool = config.kv_blocks or 1024  # what the machine has room for is not known yet
    tiers = {Tier.GPU: (pool, kv.policy, kv.policy_options)}
    if config.host_kv_blocks:
        tiers[Tier.CPU] = config.host_kv_blocks, kv.cpu_policy, kv.cpu_options
    if kv.disk is not None:
        tiers[Tier.NVME] = pool, kv.disk_policy, kv.disk_options
    for capacity, name, options in tiers.values():
        make_policy(name, capacity, **options)
    make_migration_policy(kv.migration)
    if kv.quotas:
        from sagellm.kv_runtime.quota import QuotaManager

        QuotaManager(kv.quotas, {tier: capacity for tier, (capacity, _, _) in tiers.items()})


def check_sizes(config: SageConfig, sizes: Sizes) -> None:
    """Refuse a disk tier that cannot be, once it is known what a block is. The folder keeps the schema of its blocks.

    Raises:
        ConfigError: it has no room for a block, or holds blocks whose keys and values are of another type.
        PolicyError: its policy does not take its size.
        TierError: the folder cannot be written.
    """
    kv = config.kv
    if kv is None or kv.disk is None:
        return
    from sagellm.kv_policy.registry import make_policy
    from sagellm.kv_runtime.tiered_kv_disk import capacity_blocks

    capacity = capacity_blocks(kv.disk_gib, sizes.schema.block_bytes)
    if not capacity:
        raise ConfigError(
            f"kv.disk_gib {kv.disk_gib:g} has no room for one block of {sizes.schema.block_bytes} bytes; raise --kv-disk-gib."
        )
    make_policy(kv.disk_policy, capacity, **kv.disk_options)
    _keep_schema(kv.disk, sizes.schema)


def _keep_schema(folder: Path, schema: KVCacheSchema) -> None:
    from sagellm.kv_runtime.disk_store_folder import tier_errors

    file = folder / SCHEMA_FILE
    with tier_errors(f"disk tier {folder}"):
        if file.is_file():
            found = KVCacheSchema.from_json(file.read_text(encoding="utf-8"))
            if found == schema:
                return
            differs = any(getattr(found, name) != getattr(schema, name) for name in ("dtype", "scale_dtype", "layout"))
            if differs and any(folder.glob("*.kv")):
                raise ConfigError(
                    f"kv.disk {folder} holds blocks with keys and values in {found.dtype}, and this engine stores them in "
                    f"{schema.dtype}; give another folder, empty this one, or start with --kv-schema {found.dtype}."
                )
        folder.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f".{SCHEMA_FILE}.new")
        new.write_text(schema.to_json() + "\n", encoding="utf-8")
        new.replace(file)
