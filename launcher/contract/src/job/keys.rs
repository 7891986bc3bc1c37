//! The table of keys: every key of job.yaml, the values that it accepts, and its default.
//!
//! The decoder takes its defaults from this table, and a test compares docs/job.md with it.
use super::deprecated;

/// One key of job.yaml, with the values that it accepts, its default and its aliases.
#[derive(Debug)]
pub struct KeyInfo {
    /// The whole path of the key, e.g. `train.batch.global`.
    pub path: &'static str,
    /// The values that the key accepts, in the words of docs/job.md.
    pub accepts: &'static str,
    /// The value that the key has if the job does not contain it.
    pub default: KeyDefault,
    /// Other permanent names of the last part of the path. Most of them are DeepSpeed's names.
    pub aliases: &'static [&'static str],
}

/// The value of a key that the job does not contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyDefault {
    /// A fixed value, which is written in YAML.
    Yaml(&'static str),
    /// A value that is computed from other keys or files. The text describes the computation.
    Computed(&'static str),
    /// No value. The key is a section, and its keys have their own defaults.
    Section,
}

/// Creates a key with a fixed default, which is written in YAML.
const fn new_key(path: &'static str, accepts: &'static str, default: &'static str) -> KeyInfo {
    KeyInfo { path, accepts, default: KeyDefault::Yaml(default), aliases: &[] }
}

/// Creates a section, whose keys follow it in the table.
const fn new_section(path: &'static str) -> KeyInfo {
    KeyInfo { path, accepts: "mapping", default: KeyDefault::Section, aliases: &[] }
}

/// Creates a key whose default is computed from other keys or files. `default` describes the
/// computation.
const fn new_computed_key(path: &'static str, accepts: &'static str, default: &'static str) -> KeyInfo {
    KeyInfo { path, accepts, default: KeyDefault::Computed(default), aliases: &[] }
}

impl KeyInfo {
    const fn with_aliases(mut self, aliases: &'static [&'static str]) -> Self {
        self.aliases = aliases;
        self
    }
}

/// All keys of job.yaml, section by section, in the order of docs/job.md.
pub static KEYS: &[KeyInfo] = &[
    new_computed_key(
        "name",
        "text: letters, digits, `.`, `_`, `-`",
        "the name of the job file without extension",
    ),
    new_section("cluster"),
    new_key("cluster.hosts", "`auto`, `local`, `slurm`, list of hosts, or `{file: hostfile}`", "auto"),
    new_key("cluster.use_hosts", "`all` or integer of 1 or more", "all"),
    new_key("cluster.workers_per_host", "`auto` or integer from 1 to 1024", "auto")
        .with_aliases(&["nproc_per_node"]),
    new_key("cluster.devices", "`auto`, `cpu`, `cuda` or list of integers", "auto"),
    new_key("cluster.workers_per_gpu", "integer from 1 to 64", "1"),
    new_key("cluster.comm_backend", "`auto`, `nccl` or `host`", "auto"),
    new_key("cluster.cuda_library_paths", "list of paths", "[]"),
    new_key("cluster.include", "list of text", "[]"),
    new_key("cluster.exclude", "list of text", "[]"),
    new_key("cluster.master_port", "`auto` or integer from 1 to 65535", "auto"),
    new_key("cluster.store", "`agent` or `rank0`", "agent"),
    new_section("cluster.ssh"),
    new_computed_key("cluster.ssh.user", "text", "from the SSH configuration, else the current user"),
    new_computed_key("cluster.ssh.port", "integer from 1 to 65535", "from the SSH configuration, else 22"),
    new_computed_key(
        "cluster.ssh.key",
        "path",
        "from the SSH configuration, then the agent, then the default keys",
    ),
    new_key("cluster.ssh.config", "`default`, `none` or path", "default"),
    new_key("cluster.ssh.known_hosts", "`strict` or `accept_new`", "strict"),
    new_computed_key(
        "cluster.ssh.jump",
        "text: `[user@]host[:port]`",
        "from the SSH configuration, else none",
    ),
    new_key("cluster.ssh.connect_timeout", "duration", "10s"),
    new_key("cluster.ssh.fanout", "integer from 1 to 1024", "64"),
    new_key("cluster.interface", "`auto`, name of an interface or network such as `10.1.0.0/16`", "auto"),
    new_section("run"),
    new_computed_key("run.command", "list of text", "none: the built-in training, which needs `train`"),
    new_key("run.workdir", "path", "."),
    new_key("run.env", "mapping of names to text, `{from_env: NAME}` or `{from_file: path}`", "{}"),
    new_key("run.pass_env", "list of patterns", "[]"),
    new_key("run.cpu_bind", "`auto`, `none`, `numa` or `cores`", "auto"),
    new_key("run.visible_devices", "`all` or `one`", "all"),
    new_key("run.local_rank_argument", "`true` or `false`", "false"),
    new_key("run.restarts", "integer from 0 to 10000", "0"),
    new_key("run.min_hosts", "`all` or integer of 1 or more", "all"),
    new_key("run.grace_period", "duration", "30s"),
    new_key("run.hang_timeout", "`off` or duration of 1s or more", "off"),
    new_key("run.progress_pattern", "`off` or text", "off"),
    new_key(
        "run.signals",
        "mapping of SIGUSR1, SIGUSR2, SIGTERM to `save`, `save_and_stop` or `ignore`",
        "{SIGUSR1: save, SIGUSR2: ignore, SIGTERM: save_and_stop}",
    ),
    new_section("run.logs"),
    new_key("run.logs.dir", "path with `{name}` and `{run}`", "runs/{name}/{run}"),
    new_key("run.logs.show", "list of integers", "[0]"),
    new_key("run.logs.prefix", "`true` or `false`", "true"),
    new_key("run.logs.max_size", "size", "1GiB"),
    new_section("train"),
    new_section("train.model"),
    new_key("train.model.family", "text", "llama"),
    new_computed_key("train.model.from", "path", "none: a new model from these keys"),
    new_computed_key(
        "train.model.dropout",
        "number from 0 to below 1",
        "0; with `from` the rates of config.json",
    ),
    new_key("train.model.vocab_size", "`auto` or integer from 1 to 16777216", "auto"),
    new_key("train.model.hidden_size", "integer from 1 to 1048576", "256"),
    new_computed_key(
        "train.model.intermediate_size",
        "integer from 1 to 4194304",
        "8/3 `hidden_size`, rounded up to a multiple of 16; `gpt2`: 4 `hidden_size`",
    ),
    new_key("train.model.num_hidden_layers", "integer from 1 to 4096", "4"),
    new_key("train.model.num_attention_heads", "integer from 1 to 65536", "4"),
    new_computed_key("train.model.num_key_value_heads", "integer from 1 to 65536", "`num_attention_heads`"),
    new_computed_key(
        "train.model.head_dim",
        "integer from 2 to 65536, even",
        "`hidden_size` / `num_attention_heads`",
    ),
    new_computed_key("train.model.num_experts", "integer from 1 to 65536", "8 in a family with experts"),
    new_computed_key(
        "train.model.num_experts_per_tok",
        "integer from 1 to 65536",
        "2 in a family with experts",
    ),
    new_computed_key("train.model.moe_intermediate_size", "integer from 1 to 4194304", "`intermediate_size`"),
    new_key("train.model.max_position_embeddings", "`auto` or integer from 1 to 16777216", "auto"),
    new_key("train.model.rms_norm_eps", "number above 0", "1e-6"),
    new_key("train.model.rope_theta", "number above 0", "10000"),
    new_computed_key(
        "train.model.tie_word_embeddings",
        "`true` or `false`",
        "`false`; `true` with `gpt2` and `gemma…`",
    ),
    new_key("train.model.initializer_range", "number above 0", "0.02"),
    new_key("train.freeze", "list of patterns", "[]"),
    new_computed_key("train.train_only", "list of patterns", "all except those of `freeze`"),
    new_section("train.lora"),
    new_computed_key("train.lora.from", "path", "none: new adapters"),
    new_key("train.lora.rank", "integer from 1 to 65536", "8"),
    new_computed_key("train.lora.alpha", "number above 0", "`rank`"),
    new_computed_key(
        "train.lora.dropout",
        "number from 0 to below 1",
        "0; with `from` the value of adapter_config.json",
    ),
    new_key("train.lora.rslora", "`true` or `false`", "false"),
    new_key("train.lora.targets", "`all-linear` or list of module names", "all-linear"),
    new_section("train.experts"),
    new_key("train.experts.expert_parallel_size", "integer from 1 to 1024", "1"),
    new_key(
        "train.experts.placement",
        "`balanced`, experts with their ranks, or layers with such mappings",
        "balanced",
    ),
    new_computed_key(
        "train.experts.aux_loss",
        "number of 0 or more",
        "`router_aux_loss_coef` of config.json",
    ),
    new_key("train.experts.z_loss", "number of 0 or more", "0"),
    new_section("train.data"),
    new_computed_key("train.data.files", "list of paths and globs", "required without `mixture`"),
    new_key("train.data.format", "`text` or `chat`", "text"),
    new_computed_key("train.data.field", "text", "`text`; `messages` for chats"),
    new_computed_key("train.data.loss_on", "`assistant` or `all`", "`assistant` for chats, else `all`"),
    new_computed_key("train.data.chat_template", "path", "the template of the tokenizer"),
    new_computed_key(
        "train.data.mixture",
        "mapping of names to `{files, weight, format, field, loss_on}`",
        "none",
    ),
    new_computed_key(
        "train.data.tokenizer",
        "`bytes` or path of a tokenizer.json",
        "`bytes`; with `model.from` its tokenizer.json",
    ),
    new_key("train.data.seq_len", "integer from 1 to 1048576", "256"),
    new_key("train.data.pack", "`true` or `false`", "true"),
    new_key("train.data.shuffle", "`true` or `false`", "true"),
    new_key("train.data.held_out", "number from 0 to below 1", "0"),
    new_key("train.data.cache", "path", ".launch-cache"),
    new_section("train.zero"),
    new_key("train.zero.stage", "integer from 0 to 3", "3"),
    new_key("train.zero.prefetch", "integer from 0 to 64", "1"),
    new_key("train.zero.max_live_parameters", "integer of 0 or more", "0"),
    new_key("train.zero.offload", "`none`, `{optimizer: cpu}` or `{optimizer: path}`", "none"),
    new_key("train.precision", "`fp32`, `bf16`, `fp16` or `fp8`", "fp32"),
    new_key("train.master_weights", "`true` or `false`", "true"),
    new_section("train.loss_scale"),
    new_key("train.loss_scale.initial_scale_power", "integer from 0 to 32", "16"),
    new_key("train.loss_scale.loss_scale_window", "integer of 1 or more", "2000"),
    new_key("train.loss_scale.min_loss_scale", "number above 0", "1"),
    new_section("train.batch"),
    new_key("train.batch.global", "integer from 1 to 1048576", "64").with_aliases(&["train_batch_size"]),
    new_key("train.batch.micro", "integer from 1 to 65536", "4")
        .with_aliases(&["train_micro_batch_size_per_gpu"]),
    new_section("train.optimizer"),
    new_key("train.optimizer.name", "`adamw`, `sgd`, `lion` or `muon`", "adamw"),
    new_key("train.optimizer.lr", "number above 0", "3e-4"),
    new_computed_key(
        "train.optimizer.betas",
        "two numbers from 0 to below 1",
        "[0.9, 0.95]; with `lion` [0.9, 0.99]",
    ),
    new_key("train.optimizer.eps", "number above 0", "1e-8"),
    new_computed_key(
        "train.optimizer.momentum",
        "number from 0 to below 1",
        "0.9 with `sgd`, 0.95 with `muon`",
    ),
    new_key("train.optimizer.weight_decay", "number of 0 or more", "0.1"),
    new_key("train.optimizer.no_decay", "list of patterns", "[\"*norm*\", \"*.ln_*\", \"*.bias\"]"),
    new_key("train.optimizer.groups", "list of groups", "[]"),
    new_section("train.schedule"),
    new_key("train.schedule.name", "`cosine`, `linear`, `constant` or `wsd`", "constant"),
    new_key("train.schedule.warmup_steps", "integer of 0 or more", "0").with_aliases(&["warmup_num_steps"]),
    new_computed_key("train.schedule.min_lr", "number of 0 or more", "a tenth of `optimizer.lr`"),
    new_computed_key("train.schedule.decay_steps", "integer of 1 or more", "a fifth of `steps` with `wsd`"),
    new_key("train.clip_norm", "`off` or number above 0", "1.0").with_aliases(&["gradient_clipping"]),
    new_key("train.steps", "integer of 1 or more, or 0 with `model.from`", "200"),
    new_key("train.seed", "integer of 0 or more", "1234"),
    new_key("train.recompute", "`none` or `block`", "none"),
    new_key("train.deterministic", "`true` or `false`", "true"),
    new_key("train.attention", "`auto`, `flash` or `cudnn`", "auto"),
    new_key("train.cuda_graphs", "`auto`, `true` or `false`", "auto"),
    new_section("train.eval"),
    new_key("train.eval.every", "integer of 1 or more", "50"),
    new_key("train.eval.files", "list of paths and globs", "[]"),
    new_key("train.eval.samples", "integer from 1 to 1048576", "64"),
    new_section("train.eval.sample"),
    new_computed_key("train.eval.sample.prompt", "text", "required"),
    new_key("train.eval.sample.tokens", "integer from 1 to 4096", "32"),
    new_key("train.eval.sample.temperature", "number of 0 or more", "0"),
    new_section("checkpoint"),
    new_key("checkpoint.dir", "path with `{name}`", "runs/{name}/checkpoints"),
    new_key("checkpoint.every", "integer of 1 or more, duration, or `never`", "100"),
    new_key("checkpoint.keep", "integer of 0 or more", "3"),
    new_key("checkpoint.async", "`true` or `false`", "true"),
    new_key("checkpoint.parity", "`true` or `false`", "false"),
    new_key("checkpoint.require_shared", "`true` or `false`", "false"),
    new_key("checkpoint.gather_16bit_weights_on_model_save", "`true` or `false`", "true").with_aliases(&[
        "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
    ]),
    new_section("resume"),
    new_key("resume.from", "`auto`, `never` or path", "auto"),
    new_key("resume.rng", "`reconcile`, `strict` or `reseed`", "reconcile"),
    new_section("slurm"),
    new_computed_key("slurm.partition", "text", "Slurm's default"),
    new_computed_key("slurm.account", "text", "Slurm's default"),
    new_computed_key("slurm.qos", "text", "Slurm's default"),
    new_key("slurm.nodes", "integer from 1 to 16384", "1"),
    new_computed_key("slurm.time", "duration of 1m or more", "the limit of the partition"),
    new_key("slurm.gpus_per_node", "integer from 0 to 1024", "0"),
    new_computed_key("slurm.cpus_per_task", "integer from 1 to 65536", "Slurm's default"),
    new_computed_key("slurm.mem", "size", "Slurm's default"),
    new_key("slurm.extra", "list of options", "[]"),
    new_key("slurm.signal_time", "duration", "120s"),
    new_key("slurm.requeues", "integer from 0 to 10000", "10"),
    new_key("slurm.bcast", "`true` or `false`", "false"),
];

/// Returns the key with this path; `None` if there is none. Aliases and deprecated names are not
/// found.
pub(crate) fn find_key(path: &str) -> Option<&'static KeyInfo> {
    KEYS.iter().find(|k| k.path == path)
}

/// Returns the keys directly within the section `section`, each with the last part of its path.
/// `""` is the top level of the job.
pub(crate) fn list_section_keys(section: &str) -> impl Iterator<Item = (&'static str, &'static KeyInfo)> {
    KEYS.iter().filter_map(move |k| {
        let (parent, name) = k.path.rsplit_once('.').unwrap_or(("", k.path));
        (parent == section).then_some((name, k))
    })
}

/// Returns the path of a key as docs/job.md documents it. The last part of `path` may be an alias
/// or a deprecated name. An unknown path is returned unchanged.
pub(crate) fn canonicalize_key_path(path: &str) -> String {
    let (parent, last) = path.rsplit_once('.').unwrap_or(("", path));
    let by_alias =
        list_section_keys(parent).find(|(_, k)| k.aliases.contains(&last)).map(|(_, k)| k.path.to_owned());
    let by_old_name = || {
        deprecated::find_present_name(parent, last).map(|name| super::source_map::join_key_path(parent, name))
    };
    by_alias.or_else(by_old_name).unwrap_or_else(|| path.to_owned())
}
