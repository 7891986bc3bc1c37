//! The table of keys: every key of job.yaml, the values that it accepts, and its default.
//!
//! The decoder takes its defaults from this table, and a test compares docs/job.md with it.
use super::deprecated;

/// One key of job.yaml.
#[derive(Debug)]
pub struct Key {
    /// The whole path, e.g. `train.batch.global`.
    pub path: &'static str,
    /// The accepted values, in the words of docs/job.md.
    pub accepts: &'static str,
    /// The value when the key is absent.
    pub default: KeyDefault,
    /// Alternative last names of the key, which are not deprecated. Most are DeepSpeed's.
    pub aliases: &'static [&'static str],
}

/// The value of a key that is absent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyDefault {
    /// This YAML.
    Yaml(&'static str),
    /// A value that follows from other keys or files; described in words.
    Computed(&'static str),
    /// The key is a section, whose keys have their own defaults.
    Section,
}

const fn key(path: &'static str, accepts: &'static str, default: &'static str) -> Key {
    Key { path, accepts, default: KeyDefault::Yaml(default), aliases: &[] }
}

const fn section(path: &'static str) -> Key {
    Key { path, accepts: "mapping", default: KeyDefault::Section, aliases: &[] }
}

const fn computed(path: &'static str, accepts: &'static str, default: &'static str) -> Key {
    Key { path, accepts, default: KeyDefault::Computed(default), aliases: &[] }
}

impl Key {
    const fn with_aliases(mut self, aliases: &'static [&'static str]) -> Self {
        self.aliases = aliases;
        self
    }
}

/// Every key, section by section.
pub static KEYS: &[Key] = &[
    computed("name", "text: letters, digits, `.`, `_`, `-`", "the name of the job file without extension"),
    section("cluster"),
    key("cluster.hosts", "`auto`, `local`, `slurm`, list of hosts, or `{file: hostfile}`", "auto"),
    key("cluster.use_hosts", "`all` or integer of 1 or more", "all"),
    key("cluster.workers_per_host", "`auto` or integer from 1 to 1024", "auto")
        .with_aliases(&["nproc_per_node"]),
    key("cluster.devices", "`auto`, `cpu`, `cuda` or list of integers", "auto"),
    key("cluster.workers_per_gpu", "integer from 1 to 64", "1"),
    key("cluster.comm_backend", "`auto`, `nccl` or `host`", "auto"),
    key("cluster.cuda_library_paths", "list of paths", "[]"),
    key("cluster.include", "list of text", "[]"),
    key("cluster.exclude", "list of text", "[]"),
    key("cluster.master_port", "`auto` or integer from 1 to 65535", "auto"),
    key("cluster.store", "`agent` or `rank0`", "agent"),
    section("cluster.ssh"),
    computed("cluster.ssh.user", "text", "from the SSH configuration, else the current user"),
    computed("cluster.ssh.port", "integer from 1 to 65535", "from the SSH configuration, else 22"),
    computed("cluster.ssh.key", "path", "from the SSH configuration, then the agent, then the default keys"),
    key("cluster.ssh.config", "`default`, `none` or path", "default"),
    key("cluster.ssh.known_hosts", "`strict` or `accept_new`", "strict"),
    computed("cluster.ssh.jump", "text: `[user@]host[:port]`", "from the SSH configuration, else none"),
    key("cluster.ssh.connect_timeout", "duration", "10s"),
    key("cluster.ssh.fanout", "integer from 1 to 1024", "64"),
    key("cluster.interface", "`auto`, name of an interface or network such as `10.1.0.0/16`", "auto"),
    section("run"),
    computed("run.command", "list of text", "none: the built-in training, which needs `train`"),
    key("run.workdir", "path", "."),
    key("run.env", "mapping of names to text, `{from_env: NAME}` or `{from_file: path}`", "{}"),
    key("run.pass_env", "list of patterns", "[]"),
    key("run.cpu_bind", "`auto`, `none`, `numa` or `cores`", "auto"),
    key("run.visible_devices", "`all` or `one`", "all"),
    key("run.local_rank_argument", "`true` or `false`", "false"),
    key("run.restarts", "integer from 0 to 10000", "0"),
    key("run.min_hosts", "`all` or integer of 1 or more", "all"),
    key("run.grace_period", "duration", "30s"),
    key("run.hang_timeout", "`off` or duration of 1s or more", "off"),
    key("run.progress_pattern", "`off` or text", "off"),
    key(
        "run.signals",
        "mapping of SIGUSR1, SIGUSR2, SIGTERM to `save`, `save_and_stop` or `ignore`",
        "{SIGUSR1: save, SIGUSR2: ignore, SIGTERM: save_and_stop}",
    ),
    section("run.logs"),
    key("run.logs.dir", "path with `{name}` and `{run}`", "runs/{name}/{run}"),
    key("run.logs.show", "list of integers", "[0]"),
    key("run.logs.prefix", "`true` or `false`", "true"),
    key("run.logs.max_size", "size", "1GiB"),
    section("train"),
    section("train.model"),
    key("train.model.family", "text", "llama"),
    computed("train.model.from", "path", "none: a new model from these keys"),
    computed("train.model.dropout", "number from 0 to below 1", "0; with `from` the rates of config.json"),
    key("train.model.vocab_size", "`auto` or integer from 1 to 16777216", "auto"),
    key("train.model.hidden_size", "integer from 1 to 1048576", "256"),
    computed(
        "train.model.intermediate_size",
        "integer from 1 to 4194304",
        "8/3 `hidden_size`, rounded up to a multiple of 16; `gpt2`: 4 `hidden_size`",
    ),
    key("train.model.num_hidden_layers", "integer from 1 to 4096", "4"),
    key("train.model.num_attention_heads", "integer from 1 to 65536", "4"),
    computed("train.model.num_key_value_heads", "integer from 1 to 65536", "`num_attention_heads`"),
    computed(
        "train.model.head_dim",
        "integer from 2 to 65536, even",
        "`hidden_size` / `num_attention_heads`",
    ),
    computed("train.model.num_experts", "integer from 1 to 65536", "8 in a family with experts"),
    computed("train.model.num_experts_per_tok", "integer from 1 to 65536", "2 in a family with experts"),
    computed("train.model.moe_intermediate_size", "integer from 1 to 4194304", "`intermediate_size`"),
    key("train.model.max_position_embeddings", "`auto` or integer from 1 to 16777216", "auto"),
    key("train.model.rms_norm_eps", "number above 0", "1e-6"),
    key("train.model.rope_theta", "number above 0", "10000"),
    computed(
        "train.model.tie_word_embeddings",
        "`true` or `false`",
        "`false`; `true` with `gpt2` and `gemma…`",
    ),
    key("train.model.initializer_range", "number above 0", "0.02"),
    key("train.freeze", "list of patterns", "[]"),
    computed("train.train_only", "list of patterns", "all except those of `freeze`"),
    section("train.lora"),
    computed("train.lora.from", "path", "none: new adapters"),
    key("train.lora.rank", "integer from 1 to 65536", "8"),
    computed("train.lora.alpha", "number above 0", "`rank`"),
    computed(
        "train.lora.dropout",
        "number from 0 to below 1",
        "0; with `from` the value of adapter_config.json",
    ),
    key("train.lora.rslora", "`true` or `false`", "false"),
    key("train.lora.targets", "`all-linear` or list of module names", "all-linear"),
    section("train.experts"),
    key("train.experts.expert_parallel_size", "integer from 1 to 1024", "1"),
    key(
        "train.experts.placement",
        "`balanced`, experts with their ranks, or layers with such mappings",
        "balanced",
    ),
    computed("train.experts.aux_loss", "number of 0 or more", "`router_aux_loss_coef` of config.json"),
    key("train.experts.z_loss", "number of 0 or more", "0"),
    section("train.data"),
    computed("train.data.files", "list of paths and globs", "required without `mixture`"),
    key("train.data.format", "`text` or `chat`", "text"),
    computed("train.data.field", "text", "`text`; `messages` for chats"),
    computed("train.data.loss_on", "`assistant` or `all`", "`assistant` for chats, else `all`"),
    computed("train.data.chat_template", "path", "the template of the tokenizer"),
    computed("train.data.mixture", "mapping of names to `{files, weight, format, field, loss_on}`", "none"),
    computed(
        "train.data.tokenizer",
        "`bytes` or path of a tokenizer.json",
        "`bytes`; with `model.from` its tokenizer.json",
    ),
    key("train.data.seq_len", "integer from 1 to 1048576", "256"),
    key("train.data.pack", "`true` or `false`", "true"),
    key("train.data.shuffle", "`true` or `false`", "true"),
    key("train.data.held_out", "number from 0 to below 1", "0"),
    key("train.data.cache", "path", ".launch-cache"),
    section("train.zero"),
    key("train.zero.stage", "integer from 0 to 3", "3"),
    key("train.zero.prefetch", "integer from 0 to 64", "1"),
    key("train.zero.max_live_parameters", "integer of 0 or more", "0"),
    key("train.zero.offload", "`none`, `{optimizer: cpu}` or `{optimizer: path}`", "none"),
    key("train.precision", "`fp32`, `bf16`, `fp16` or `fp8`", "fp32"),
    key("train.master_weights", "`true` or `false`", "true"),
    section("train.loss_scale"),
    key("train.loss_scale.initial_scale_power", "integer from 0 to 32", "16"),
    key("train.loss_scale.loss_scale_window", "integer of 1 or more", "2000"),
    key("train.loss_scale.min_loss_scale", "number above 0", "1"),
    section("train.batch"),
    key("train.batch.global", "integer from 1 to 1048576", "64").with_aliases(&["train_batch_size"]),
    key("train.batch.micro", "integer from 1 to 65536", "4")
        .with_aliases(&["train_micro_batch_size_per_gpu"]),
    section("train.optimizer"),
    key("train.optimizer.name", "`adamw`, `sgd`, `lion` or `muon`", "adamw"),
    key("train.optimizer.lr", "number above 0", "3e-4"),
    computed(
        "train.optimizer.betas",
        "two numbers from 0 to below 1",
        "[0.9, 0.95]; with `lion` [0.9, 0.99]",
    ),
    key("train.optimizer.eps", "number above 0", "1e-8"),
    computed("train.optimizer.momentum", "number from 0 to below 1", "0.9 with `sgd`, 0.95 with `muon`"),
    key("train.optimizer.weight_decay", "number of 0 or more", "0.1"),
    key("train.optimizer.no_decay", "list of patterns", "[\"*norm*\", \"*.ln_*\", \"*.bias\"]"),
    key("train.optimizer.groups", "list of groups", "[]"),
    section("train.schedule"),
    key("train.schedule.name", "`cosine`, `linear`, `constant` or `wsd`", "constant"),
    key("train.schedule.warmup_steps", "integer of 0 or more", "0").with_aliases(&["warmup_num_steps"]),
    computed("train.schedule.min_lr", "number of 0 or more", "a tenth of `optimizer.lr`"),
    computed("train.schedule.decay_steps", "integer of 1 or more", "a fifth of `steps` with `wsd`"),
    key("train.clip_norm", "`off` or number above 0", "1.0").with_aliases(&["gradient_clipping"]),
    key("train.steps", "integer of 1 or more", "200"),
    key("train.seed", "integer of 0 or more", "1234"),
    key("train.recompute", "`none` or `block`", "none"),
    key("train.deterministic", "`true` or `false`", "true"),
    key("train.attention", "`auto`, `flash` or `cudnn`", "auto"),
    key("train.cuda_graphs", "`auto`, `true` or `false`", "auto"),
    section("train.eval"),
    key("train.eval.every", "integer of 1 or more", "50"),
    key("train.eval.files", "list of paths and globs", "[]"),
    key("train.eval.samples", "integer from 1 to 1048576", "64"),
    section("train.eval.sample"),
    computed("train.eval.sample.prompt", "text", "required"),
    key("train.eval.sample.tokens", "integer from 1 to 4096", "32"),
    key("train.eval.sample.temperature", "number of 0 or more", "0"),
    section("checkpoint"),
    key("checkpoint.dir", "path with `{name}`", "runs/{name}/checkpoints"),
    key("checkpoint.every", "integer of 1 or more, duration, or `never`", "100"),
    key("checkpoint.keep", "integer of 0 or more", "3"),
    key("checkpoint.async", "`true` or `false`", "true"),
    key("checkpoint.parity", "`true` or `false`", "false"),
    key("checkpoint.require_shared", "`true` or `false`", "false"),
    key("checkpoint.gather_16bit_weights_on_model_save", "`true` or `false`", "true").with_aliases(&[
        "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
    ]),
    section("resume"),
    key("resume.from", "`auto`, `never` or path", "auto"),
    key("resume.rng", "`reconcile`, `strict` or `reseed`", "reconcile"),
    section("slurm"),
    computed("slurm.partition", "text", "Slurm's default"),
    computed("slurm.account", "text", "Slurm's default"),
    computed("slurm.qos", "text", "Slurm's default"),
    key("slurm.nodes", "integer from 1 to 16384", "1"),
    computed("slurm.time", "duration of 1m or more", "the limit of the partition"),
    key("slurm.gpus_per_node", "integer from 0 to 1024", "0"),
    computed("slurm.cpus_per_task", "integer from 1 to 65536", "Slurm's default"),
    computed("slurm.mem", "size", "Slurm's default"),
    key("slurm.extra", "list of options", "[]"),
    key("slurm.signal_time", "duration", "120s"),
    key("slurm.requeues", "integer from 0 to 10000", "10"),
    key("slurm.bcast", "`true` or `false`", "false"),
];

/// Returns the key with this documented path.
pub(crate) fn find(path: &str) -> Option<&'static Key> {
    KEYS.iter().find(|k| k.path == path)
}

/// Returns the keys directly within a section, each with the last name of its path. `""` is the top
/// level of the job.
pub(crate) fn names_in(section: &str) -> impl Iterator<Item = (&'static str, &'static Key)> {
    KEYS.iter().filter_map(move |k| {
        let (parent, name) = k.path.rsplit_once('.').unwrap_or(("", k.path));
        (parent == section).then_some((name, k))
    })
}

/// Returns the documented path of a key. `path` may end in an alias or a deprecated name; an
/// unknown path is returned unchanged.
pub(crate) fn canonical(path: &str) -> String {
    let (parent, last) = path.rsplit_once('.').unwrap_or(("", path));
    let by_alias = names_in(parent).find(|(_, k)| k.aliases.contains(&last)).map(|(_, k)| k.path.to_owned());
    let by_old_name = || deprecated::present_name(parent, last).map(|name| super::source::join(parent, name));
    by_alias.or_else(by_old_name).unwrap_or_else(|| path.to_owned())
}
