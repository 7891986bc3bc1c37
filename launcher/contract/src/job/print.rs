//! Prints a [`JobSpec`] as a job.yaml with every key, for `--dry-run`. A job that is loaded from
//! this text equals the printed job.
use super::model::GPT2;
use super::{
    CheckpointSpec, ClusterSpec, CommBackend, CpuBind, DataSource, DataSpec, DeviceSelection, EnvSource,
    EvalSpec, ExpertPlacement, ExpertsSpec, HostSelection, InterfaceSelector, JobSpec, KnownHosts, LoraSpec,
    LoraTargets, LossTargets, MasterPort, MinHosts, ModelSpec, OptimizerName, OptimizerSpec, ParamGroupSpec,
    Precision, RecomputeMode, RecordFormat, ResumeFrom, ResumeSpec, RngPolicy, RunSpec, SaveInterval,
    ScheduleName, ScheduleSpec, SignalAction, Signals, SlurmSpec, SshConfig, SshSpec, StoreHost,
    TokenizerSpec, TrainSpec, VisibleDevices, WorkersPerHost, scalar, yaml::YamlValue,
};
use std::{fmt::Write, path::PathBuf};

impl JobSpec {
    /// Formats the whole job as YAML. Leaves out keys that have no effect in this job, such as
    /// `momentum` with AdamW.
    pub fn to_yaml(&self) -> String {
        let mut y = YamlWriter::default();
        y.print_key("name", format_text(&self.name));
        let on_gpus = self.run.command.is_none() && self.cluster.trains_on_gpus();
        y.print_section("cluster", |y| print_cluster(y, &self.cluster, on_gpus));
        y.print_section("run", |y| print_run(y, &self.run));
        if let Some(train) = &self.train {
            y.print_section("train", |y| print_train(y, train));
            y.print_section("checkpoint", |y| print_checkpoint(y, &self.checkpoint));
            y.print_section("resume", |y| print_resume(y, &self.resume));
        } else if self.resume.from != ResumeFrom::Never {
            if self.resume.from == ResumeFrom::Auto {
                y.print_section("checkpoint", |y| {
                    y.print_key("dir", format_text(&self.checkpoint.dir.to_string_lossy()))
                });
            }
            y.print_section("resume", |y| print_resume(y, &self.resume));
        }
        y.print_section("slurm", |y| print_slurm(y, &self.slurm));
        y.out
    }
}

/// Collects lines of the form `key: value`, indented by two spaces per section.
#[derive(Default)]
struct YamlWriter {
    out: String,
    depth: usize,
}

impl YamlWriter {
    /// Appends the line `key: value`, indented for the current section.
    fn print_key(&mut self, key: &str, value: impl std::fmt::Display) {
        // Writing to a String cannot fail.
        _ = writeln!(self.out, "{:indent$}{key}: {value}", "", indent = 2 * self.depth);
    }

    /// Appends the line of the section `key`. Then calls `body`, which prints the keys of the
    /// section with more indentation.
    fn print_section(&mut self, key: &str, body: impl FnOnce(&mut Self)) {
        _ = writeln!(self.out, "{:indent$}{key}:", "", indent = 2 * self.depth);
        self.depth += 1;
        body(self);
        self.depth -= 1;
    }
}

fn print_cluster(y: &mut YamlWriter, c: &ClusterSpec, on_gpus: bool) {
    y.print_key(
        "hosts",
        match &c.hosts {
            HostSelection::Auto => "auto".to_owned(),
            HostSelection::Slurm => "slurm".to_owned(),
            HostSelection::Local => "local".to_owned(),
            HostSelection::List(hosts) => format_text_list(hosts),
            HostSelection::File(path) => format!("{{file: {}}}", format_text(&path.to_string_lossy())),
        },
    );
    y.print_key("use_hosts", c.use_hosts.map_or_else(|| "all".to_owned(), |n| n.to_string()));
    match c.workers_per_host {
        WorkersPerHost::Auto => y.print_key("workers_per_host", "auto"),
        WorkersPerHost::Exactly(n) => y.print_key("workers_per_host", n),
    }
    y.print_key(
        "devices",
        match &c.devices {
            DeviceSelection::Auto => "auto".to_owned(),
            DeviceSelection::Cpu => "cpu".to_owned(),
            DeviceSelection::Cuda => "cuda".to_owned(),
            DeviceSelection::List(numbers) => format_list(numbers.iter().map(u32::to_string)),
        },
    );
    if on_gpus {
        print_gpu_keys(y, c);
    }
    match c.master_port {
        MasterPort::Auto => y.print_key("master_port", "auto"),
        MasterPort::Fixed(port) => y.print_key("master_port", port),
    }
    y.print_key(
        "store",
        match c.store {
            StoreHost::Agent => "agent",
            StoreHost::Rank0 => "rank0",
        },
    );
    y.print_key("include", format_text_list(&c.include));
    y.print_key("exclude", format_text_list(&c.exclude));
    match &c.interface {
        InterfaceSelector::Auto => y.print_key("interface", "auto"),
        InterfaceSelector::Named(name) => y.print_key("interface", format_text(name)),
    }
    y.print_section("ssh", |y| print_ssh(y, &c.ssh));
}

/// Prints the keys of `cluster` that only apply to built-in workers on GPUs.
fn print_gpu_keys(y: &mut YamlWriter, c: &ClusterSpec) {
    y.print_key("workers_per_gpu", c.workers_per_gpu);
    y.print_key(
        "comm_backend",
        match c.comm_backend {
            CommBackend::Auto => "auto",
            CommBackend::Nccl => "nccl",
            CommBackend::Host => "host",
        },
    );
    let paths: Vec<String> = c.cuda_library_paths.iter().map(|p| p.to_string_lossy().into_owned()).collect();
    y.print_key("cuda_library_paths", format_text_list(&paths));
}

fn print_ssh(y: &mut YamlWriter, s: &SshSpec) {
    if let Some(user) = &s.user {
        y.print_key("user", format_text(user));
    }
    if let Some(port) = s.port {
        y.print_key("port", port);
    }
    if let Some(key) = &s.key {
        y.print_key("key", format_text(&key.to_string_lossy()));
    }
    match &s.config {
        SshConfig::Default => y.print_key("config", "default"),
        SshConfig::None => y.print_key("config", "none"),
        SshConfig::File(path) => y.print_key("config", format_text(&path.to_string_lossy())),
    }
    y.print_key(
        "known_hosts",
        match s.known_hosts {
            KnownHosts::Strict => "strict",
            KnownHosts::AcceptNew => "accept_new",
        },
    );
    if let Some(jump) = &s.jump {
        y.print_key("jump", format_text(jump));
    }
    y.print_key("connect_timeout", format_duration(s.connect_timeout_ms));
    y.print_key("fanout", s.fanout);
}

fn print_run(y: &mut YamlWriter, r: &RunSpec) {
    if let Some(command) = &r.command {
        y.print_key("command", format_text_list(command));
    }
    y.print_key("workdir", format_text(&r.workdir.to_string_lossy()));
    if r.env.is_empty() && r.env_from.is_empty() {
        y.print_key("env", "{}");
    } else {
        y.print_section("env", |y| {
            r.env.iter().for_each(|(name, value)| y.print_key(name, format_text(value)));
            for (name, source) in &r.env_from {
                match source {
                    EnvSource::FromEnv(from) => {
                        y.print_key(name, format!("{{from_env: {}}}", format_text(from)))
                    }
                    EnvSource::FromFile(path) => {
                        y.print_key(name, format!("{{from_file: {}}}", format_text(&path.to_string_lossy())));
                    }
                }
            }
        });
    }
    y.print_key("pass_env", format_text_list(&r.pass_env));
    y.print_key(
        "cpu_bind",
        match r.cpu_bind {
            CpuBind::Auto => "auto",
            CpuBind::None => "none",
            CpuBind::Numa => "numa",
            CpuBind::Cores => "cores",
        },
    );
    if r.command.is_some() {
        y.print_key(
            "visible_devices",
            match r.visible_devices {
                VisibleDevices::All => "all",
                VisibleDevices::One => "one",
            },
        );
        y.print_key("local_rank_argument", r.local_rank_argument);
    }
    y.print_key("restarts", r.restarts);
    match r.min_hosts {
        MinHosts::All => y.print_key("min_hosts", "all"),
        MinHosts::AtLeast(n) => y.print_key("min_hosts", n),
    }
    y.print_key("grace_period", format_duration(r.grace_period_ms));
    y.print_key("hang_timeout", r.hang_timeout_ms.map_or_else(|| "off".to_owned(), format_duration));
    y.print_key(
        "progress_pattern",
        r.progress_pattern.as_deref().map_or_else(|| "off".to_owned(), format_text),
    );
    let Signals { usr1, usr2, term } = r.signals;
    let entry = |(name, action)| format!("{name}: {}", action_name(action));
    let named = [("SIGUSR1", usr1), ("SIGUSR2", usr2), ("SIGTERM", term)].map(entry);
    y.print_key("signals", format!("{{{}}}", named.join(", ")));
    y.print_section("logs", |y| {
        y.print_key("dir", format_text(&r.logs.dir));
        y.print_key("show", format_list(r.logs.show.iter().map(u32::to_string)));
        y.print_key("prefix", r.logs.prefix);
        y.print_key("max_size", format!("{}B", r.logs.max_size));
    });
}

fn action_name(action: SignalAction) -> &'static str {
    match action {
        SignalAction::Save => "save",
        SignalAction::SaveAndStop => "save_and_stop",
        SignalAction::Ignore => "ignore",
    }
}

fn print_train(y: &mut YamlWriter, t: &TrainSpec) {
    y.print_section("model", |y| print_model(y, &t.model));
    y.print_section("data", |y| print_data(y, &t.data));
    if let Some(l) = &t.lora {
        y.print_section("lora", |y| print_lora(y, l));
    }
    if t.experts != ExpertsSpec::default() {
        y.print_section("experts", |y| print_experts(y, &t.experts));
    }
    y.print_section("zero", |y| {
        y.print_key("stage", t.zero.stage);
        y.print_key("prefetch", t.zero.prefetch);
        y.print_key("max_live_parameters", t.zero.max_live_parameters);
        let offload = t.zero.offload.clone().map(PathBuf::from);
        let offload = offload.map(|p| format!("{{optimizer: {}}}", format_text(&p.to_string_lossy())));
        y.print_key("offload", offload.unwrap_or_else(|| "none".to_owned()));
    });
    y.print_key("precision", t.precision.name());
    if t.precision.is_bf16() {
        y.print_key("master_weights", t.master_weights);
    }
    if t.precision == Precision::Fp16 {
        y.print_section("loss_scale", |y| {
            y.print_key("initial_scale_power", t.loss_scale.initial_scale_power);
            y.print_key("loss_scale_window", t.loss_scale.loss_scale_window);
            y.print_key("min_loss_scale", format_number(t.loss_scale.min_loss_scale));
        });
    }
    y.print_section("batch", |y| {
        y.print_key("global", t.batch.global);
        y.print_key("micro", t.batch.micro);
    });
    y.print_section("optimizer", |y| print_optimizer(y, &t.optimizer));
    y.print_section("schedule", |y| print_schedule(y, &t.schedule));
    y.print_key("clip_norm", t.clip_norm.map_or_else(|| "off".to_owned(), format_number));
    y.print_key("steps", t.steps);
    y.print_key("seed", t.seed);
    y.print_key(
        "recompute",
        match t.recompute {
            RecomputeMode::None => "none",
            RecomputeMode::Block => "block",
        },
    );
    y.print_key("deterministic", t.deterministic);
    y.print_key("attention", t.attention.name());
    y.print_key("cuda_graphs", t.cuda_graphs.name());
    if !t.freeze.is_empty() {
        y.print_key("freeze", format_text_list(&t.freeze));
    }
    if !t.train_only.is_empty() {
        y.print_key("train_only", format_text_list(&t.train_only));
    }
    if let Some(eval) = &t.eval {
        y.print_section("eval", |y| print_eval(y, eval));
    }
}

/// Prints `train.data`. A single source without a name is printed as `files`, and other sources as
/// `mixture`.
fn print_data(y: &mut YamlWriter, d: &DataSpec) {
    match &d.sources[..] {
        [only] if only.name.is_empty() => print_source(y, only),
        sources => y.print_section("mixture", |y| {
            for s in sources {
                y.print_section(&s.name, |y| {
                    print_source(y, s);
                    y.print_key("weight", format_number(s.weight));
                });
            }
        }),
    }
    if let Some(path) = &d.chat_template {
        y.print_key("chat_template", format_text(&path.to_string_lossy()));
    }
    match &d.tokenizer {
        TokenizerSpec::Bytes => y.print_key("tokenizer", "bytes"),
        TokenizerSpec::File(path) => y.print_key("tokenizer", format_text(&path.to_string_lossy())),
    }
    y.print_key("seq_len", d.seq_len);
    y.print_key("pack", d.pack);
    y.print_key("shuffle", d.shuffle);
    y.print_key("held_out", format_number(d.held_out));
    y.print_key("cache", format_text(&d.cache.to_string_lossy()));
}

fn print_eval(y: &mut YamlWriter, eval: &EvalSpec) {
    y.print_key("every", eval.every);
    y.print_key("files", format_text_list(&eval.files));
    y.print_key("samples", eval.samples);
    if let Some(sample) = &eval.sample {
        y.print_section("sample", |y| {
            y.print_key("prompt", format_text(&sample.prompt));
            y.print_key("tokens", sample.tokens);
            y.print_key("temperature", format_number(sample.temperature));
        });
    }
}

/// Prints the keys of a data source, except the weight.
fn print_source(y: &mut YamlWriter, s: &DataSource) {
    y.print_key("files", format_text_list(&s.files));
    y.print_key(
        "format",
        match s.format {
            RecordFormat::Text => "text",
            RecordFormat::Chat => "chat",
        },
    );
    y.print_key("field", format_text(&s.field));
    y.print_key(
        "loss_on",
        match s.loss_on {
            LossTargets::All => "all",
            LossTargets::Assistant => "assistant",
        },
    );
}

/// Prints `train.model`: the directory of the model, or the config of a new model.
fn print_model(y: &mut YamlWriter, m: &ModelSpec) {
    if let Some(directory) = &m.from {
        y.print_key("from", format_text(&directory.to_string_lossy()));
        if let Some(rate) = m.dropout {
            y.print_key("dropout", format_number(rate));
        }
        return;
    }
    let or_auto = |n: u32| if n == 0 { "auto".to_owned() } else { n.to_string() };
    y.print_key("family", format_text(&m.family));
    if let Some(rate) = m.dropout {
        y.print_key("dropout", format_number(rate));
    }
    y.print_key("vocab_size", or_auto(m.vocab_size));
    y.print_key("hidden_size", m.hidden_size);
    y.print_key("intermediate_size", m.intermediate_size);
    y.print_key("num_hidden_layers", m.num_hidden_layers);
    y.print_key("num_attention_heads", m.num_attention_heads);
    y.print_key("num_key_value_heads", m.num_key_value_heads);
    y.print_key("head_dim", m.head_dim);
    let experts = [
        ("num_experts", m.num_experts),
        ("num_experts_per_tok", m.num_experts_per_tok),
        ("moe_intermediate_size", m.moe_intermediate_size),
    ];
    for (name, n) in experts.into_iter().filter_map(|(name, n)| Some((name, n?))) {
        y.print_key(name, n);
    }
    y.print_key("max_position_embeddings", or_auto(m.max_position_embeddings));
    if m.family != GPT2 {
        y.print_key("rms_norm_eps", format_number(m.rms_norm_eps));
        y.print_key("rope_theta", format_number(m.rope_theta));
    }
    y.print_key("tie_word_embeddings", m.tie_word_embeddings);
    y.print_key("initializer_range", format_number(m.initializer_range));
}

fn print_experts(y: &mut YamlWriter, e: &ExpertsSpec) {
    y.print_key("expert_parallel_size", e.expert_parallel_size);
    let mapping = |ranks: &std::collections::BTreeMap<u32, u32>| {
        let pairs: Vec<String> = ranks.iter().map(|(expert, rank)| format!("{expert}: {rank}")).collect();
        format!("{{{}}}", pairs.join(", "))
    };
    match &e.placement {
        ExpertPlacement::Balanced => y.print_key("placement", "balanced"),
        ExpertPlacement::Experts(ranks) => y.print_key("placement", mapping(ranks)),
        ExpertPlacement::Layers(layers) => y.print_section("placement", |y| {
            layers.iter().for_each(|(layer, ranks)| y.print_key(&layer.to_string(), mapping(ranks)));
        }),
    }
    if let Some(aux_loss) = e.aux_loss {
        y.print_key("aux_loss", format_number(aux_loss));
    }
    y.print_key("z_loss", format_number(e.z_loss));
}

/// Prints the settings of new adapters, or the directory of existing ones, and the dropout.
fn print_lora(y: &mut YamlWriter, l: &LoraSpec) {
    match &l.from {
        Some(path) => y.print_key("from", format_text(&path.to_string_lossy())),
        None => {
            y.print_key("rank", l.rank);
            y.print_key("alpha", format_number(l.alpha));
            y.print_key("rslora", l.rslora);
            y.print_key(
                "targets",
                match &l.targets {
                    LoraTargets::AllLinear => "all-linear".to_owned(),
                    LoraTargets::Names(names) => format_text_list(names),
                },
            );
        }
    }
    if let Some(dropout) = l.dropout {
        y.print_key("dropout", format_number(dropout));
    }
}

/// Prints `train.optimizer`, with only those hyper-parameters that the optimizer has.
fn print_optimizer(y: &mut YamlWriter, o: &OptimizerSpec) {
    match o.name {
        OptimizerName::Adamw => {
            y.print_key("name", "adamw");
            y.print_key("betas", format_pair(o.betas));
            y.print_key("eps", format_number(o.eps));
        }
        OptimizerName::Sgd => {
            y.print_key("name", "sgd");
            y.print_key("momentum", format_number(o.momentum));
        }
        OptimizerName::Lion => {
            y.print_key("name", "lion");
            y.print_key("betas", format_pair(o.betas));
        }
        OptimizerName::Muon => {
            y.print_key("name", "muon");
            y.print_key("momentum", format_number(o.momentum));
            y.print_key("betas", format_pair(o.betas));
            y.print_key("eps", format_number(o.eps));
        }
    }
    y.print_key("lr", format_number(o.lr));
    y.print_key("weight_decay", format_number(o.weight_decay));
    y.print_key("no_decay", format_text_list(&o.no_decay));
    if !o.groups.is_empty() {
        y.print_key("groups", format_list(o.groups.iter().map(format_group)));
    }
}

fn format_group(g: &ParamGroupSpec) -> String {
    let mut parts = vec![format!("match: {}", format_text_list(&g.r#match))];
    let numbers = [
        ("lr", g.lr),
        ("lr_scale", g.lr_scale),
        ("weight_decay", g.weight_decay),
        ("eps", g.eps),
        ("momentum", g.momentum),
    ];
    parts.extend(numbers.into_iter().filter_map(|(key, x)| Some(format!("{key}: {}", format_number(x?)))));
    parts.extend(g.betas.map(|b| format!("betas: {}", format_pair(b))));
    format!("{{{}}}", parts.join(", "))
}

fn format_pair((a, b): (f64, f64)) -> String {
    format_list([format_number(a), format_number(b)].into_iter())
}

/// Prints `train.schedule`, with only those keys that apply to the schedule.
fn print_schedule(y: &mut YamlWriter, s: &ScheduleSpec) {
    y.print_key(
        "name",
        match s.name {
            ScheduleName::Cosine => "cosine",
            ScheduleName::Linear => "linear",
            ScheduleName::Constant => "constant",
            ScheduleName::Wsd => "wsd",
        },
    );
    y.print_key("warmup_steps", s.warmup_steps);
    if s.name != ScheduleName::Constant {
        y.print_key("min_lr", format_number(s.min_lr));
    }
    if s.name == ScheduleName::Wsd {
        y.print_key("decay_steps", s.decay_steps);
    }
}

fn print_checkpoint(y: &mut YamlWriter, c: &CheckpointSpec) {
    y.print_key("dir", format_text(&c.dir.to_string_lossy()));
    match c.every {
        SaveInterval::Never => y.print_key("every", "never"),
        SaveInterval::Steps(n) => y.print_key("every", n),
        SaveInterval::Duration(ms) => y.print_key("every", format_duration(ms)),
    }
    y.print_key("keep", c.keep);
    y.print_key("async", c.r#async);
    y.print_key("parity", c.parity);
    y.print_key("require_shared", c.require_shared);
    y.print_key("gather_16bit_weights_on_model_save", c.gather_16bit_weights_on_model_save);
}

fn print_resume(y: &mut YamlWriter, r: &ResumeSpec) {
    match &r.from {
        ResumeFrom::Auto => y.print_key("from", "auto"),
        ResumeFrom::Never => y.print_key("from", "never"),
        ResumeFrom::Path(path) => y.print_key("from", format_text(&path.to_string_lossy())),
    }
    y.print_key(
        "rng",
        match r.rng {
            RngPolicy::Reconcile => "reconcile",
            RngPolicy::Strict => "strict",
            RngPolicy::Reseed => "reseed",
        },
    );
}

fn print_slurm(y: &mut YamlWriter, s: &SlurmSpec) {
    for (key, value) in [("partition", &s.partition), ("account", &s.account), ("qos", &s.qos)] {
        if let Some(value) = value {
            y.print_key(key, format_text(value));
        }
    }
    y.print_key("nodes", s.nodes);
    if let Some(ms) = s.time_ms {
        y.print_key("time", format_duration(ms));
    }
    y.print_key("gpus_per_node", s.gpus_per_node);
    if let Some(cpus) = s.cpus_per_task {
        y.print_key("cpus_per_task", cpus);
    }
    if let Some(bytes) = s.mem {
        y.print_key("mem", format!("{bytes}B"));
    }
    y.print_key("extra", format_text_list(&s.extra));
    y.print_key("signal_time", format_duration(s.signal_time_ms));
    y.print_key("requeues", s.requeues);
    y.print_key("bcast", s.bcast);
}

/// Formats a text as a YAML scalar. The text is put in double quotes if YAML could read it as
/// anything else without them.
pub fn quote_yaml(plain: &str) -> String {
    format_text(plain)
}

fn format_text(text: &str) -> String {
    let simple = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '/' | '-');
    let plain = text.starts_with(|c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '/'))
        && text.chars().all(simple)
        && text != "..."
        && matches!(scalar::resolve_scalar(text), YamlValue::Text);
    if plain {
        return text.to_owned();
    }
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            '\n' => quoted.push_str("\\n"),
            '\t' => quoted.push_str("\\t"),
            // Characters that may be read as a line break, or that YAML does not allow.
            _ if c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{feff}') => {
                _ = write!(quoted, "\\u{:04x}", c as u32);
            }
            _ => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

fn format_text_list(texts: &[String]) -> String {
    format_list(texts.iter().map(|t| format_text(t)))
}

fn format_list(items: impl Iterator<Item = String>) -> String {
    format!("[{}]", items.collect::<Vec<_>>().join(", "))
}

/// Formats a duration, given in milliseconds, as `90s`. A duration that is not a whole number of
/// seconds becomes `1500ms`.
fn format_duration(ms: u64) -> String {
    if ms.is_multiple_of(1000) { format!("{}s", ms / 1000) } else { format!("{ms}ms") }
}

/// Formats a number with as few digits as possible, so that parsing the text gives exactly the
/// number.
fn format_number(x: f64) -> String {
    format!("{x:?}")
}
