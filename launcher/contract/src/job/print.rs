//! Prints a [`JobSpec`] as job.yaml with every key, as `--dry-run` shows it. Loading the text gives
//! the same job.
use super::train::GPT2;
use super::{
    CheckpointSpec, ClusterSpec, CommBackend, CpuBind, DataSource, DataSpec, Devices, EnvSource, EvalSpec,
    ExpertPlacement, ExpertsSpec, Format, GroupSpec, Hosts, Interface, JobSpec, KnownHosts, LoraSpec,
    LoraTargets, LossOn, MasterPort, MinHosts, ModelSpec, OptimizerName, OptimizerSpec, Precision, Recompute,
    ResumeFrom, ResumeSpec, RngPolicy, RunSpec, SaveInterval, ScheduleName, ScheduleSpec, SignalAction,
    Signals, SlurmSpec, SshConfig, SshSpec, StoreHost, Tokenizer, TrainSpec, VisibleDevices, WorkersPerHost,
    scalar, yaml::YamlValue,
};
use std::{fmt::Write, path::PathBuf};

impl JobSpec {
    /// The whole job as YAML. Keys without effect in this job, such as `momentum` with AdamW, are
    /// left out.
    pub fn to_yaml(&self) -> String {
        let mut y = Yaml::default();
        y.key("name", text(&self.name));
        let on_gpus = self.run.command.is_none() && self.cluster.trains_on_gpus();
        y.section("cluster", |y| print_cluster(y, &self.cluster, on_gpus));
        y.section("run", |y| print_run(y, &self.run));
        if let Some(train) = &self.train {
            y.section("train", |y| print_train(y, train));
            y.section("checkpoint", |y| print_checkpoint(y, &self.checkpoint));
            y.section("resume", |y| print_resume(y, &self.resume));
        } else if self.resume.from != ResumeFrom::Never {
            if self.resume.from == ResumeFrom::Auto {
                y.section("checkpoint", |y| y.key("dir", text(&self.checkpoint.dir.to_string_lossy())));
            }
            y.section("resume", |y| print_resume(y, &self.resume));
        }
        y.section("slurm", |y| print_slurm(y, &self.slurm));
        y.out
    }
}

/// Lines of `key: value`, indented by section.
#[derive(Default)]
struct Yaml {
    out: String,
    depth: usize,
}

impl Yaml {
    fn key(&mut self, key: &str, value: impl std::fmt::Display) {
        // Writing to a String cannot fail.
        _ = writeln!(self.out, "{:indent$}{key}: {value}", "", indent = 2 * self.depth);
    }

    fn section(&mut self, key: &str, body: impl FnOnce(&mut Self)) {
        _ = writeln!(self.out, "{:indent$}{key}:", "", indent = 2 * self.depth);
        self.depth += 1;
        body(self);
        self.depth -= 1;
    }
}

fn print_cluster(y: &mut Yaml, c: &ClusterSpec, on_gpus: bool) {
    y.key(
        "hosts",
        match &c.hosts {
            Hosts::Auto => "auto".to_owned(),
            Hosts::Slurm => "slurm".to_owned(),
            Hosts::Local => "local".to_owned(),
            Hosts::List(hosts) => texts(hosts),
            Hosts::File(path) => format!("{{file: {}}}", text(&path.to_string_lossy())),
        },
    );
    y.key("use_hosts", c.use_hosts.map_or_else(|| "all".to_owned(), |n| n.to_string()));
    match c.workers_per_host {
        WorkersPerHost::Auto => y.key("workers_per_host", "auto"),
        WorkersPerHost::Exactly(n) => y.key("workers_per_host", n),
    }
    y.key(
        "devices",
        match &c.devices {
            Devices::Auto => "auto".to_owned(),
            Devices::Cpu => "cpu".to_owned(),
            Devices::Cuda => "cuda".to_owned(),
            Devices::List(numbers) => list(numbers.iter().map(u32::to_string)),
        },
    );
    if on_gpus {
        print_gpus(y, c);
    }
    match c.master_port {
        MasterPort::Auto => y.key("master_port", "auto"),
        MasterPort::Fixed(port) => y.key("master_port", port),
    }
    y.key(
        "store",
        match c.store {
            StoreHost::Agent => "agent",
            StoreHost::Rank0 => "rank0",
        },
    );
    y.key("include", texts(&c.include));
    y.key("exclude", texts(&c.exclude));
    match &c.interface {
        Interface::Auto => y.key("interface", "auto"),
        Interface::Named(name) => y.key("interface", text(name)),
    }
    y.section("ssh", |y| print_ssh(y, &c.ssh));
}

/// Prints the keys that only apply to built-in workers on GPUs.
fn print_gpus(y: &mut Yaml, c: &ClusterSpec) {
    y.key("workers_per_gpu", c.workers_per_gpu);
    y.key(
        "comm_backend",
        match c.comm_backend {
            CommBackend::Auto => "auto",
            CommBackend::Nccl => "nccl",
            CommBackend::Host => "host",
        },
    );
    let paths: Vec<String> = c.cuda_library_paths.iter().map(|p| p.to_string_lossy().into_owned()).collect();
    y.key("cuda_library_paths", texts(&paths));
}

fn print_ssh(y: &mut Yaml, s: &SshSpec) {
    if let Some(user) = &s.user {
        y.key("user", text(user));
    }
    if let Some(port) = s.port {
        y.key("port", port);
    }
    if let Some(key) = &s.key {
        y.key("key", text(&key.to_string_lossy()));
    }
    match &s.config {
        SshConfig::Default => y.key("config", "default"),
        SshConfig::None => y.key("config", "none"),
        SshConfig::File(path) => y.key("config", text(&path.to_string_lossy())),
    }
    y.key(
        "known_hosts",
        match s.known_hosts {
            KnownHosts::Strict => "strict",
            KnownHosts::AcceptNew => "accept_new",
        },
    );
    if let Some(jump) = &s.jump {
        y.key("jump", text(jump));
    }
    y.key("connect_timeout", duration(s.connect_timeout_ms));
    y.key("fanout", s.fanout);
}

fn print_run(y: &mut Yaml, r: &RunSpec) {
    if let Some(command) = &r.command {
        y.key("command", texts(command));
    }
    y.key("workdir", text(&r.workdir.to_string_lossy()));
    if r.env.is_empty() && r.env_from.is_empty() {
        y.key("env", "{}");
    } else {
        y.section("env", |y| {
            r.env.iter().for_each(|(name, value)| y.key(name, text(value)));
            for (name, source) in &r.env_from {
                match source {
                    EnvSource::FromEnv(from) => y.key(name, format!("{{from_env: {}}}", text(from))),
                    EnvSource::FromFile(path) => {
                        y.key(name, format!("{{from_file: {}}}", text(&path.to_string_lossy())));
                    }
                }
            }
        });
    }
    y.key("pass_env", texts(&r.pass_env));
    y.key(
        "cpu_bind",
        match r.cpu_bind {
            CpuBind::Auto => "auto",
            CpuBind::None => "none",
            CpuBind::Numa => "numa",
            CpuBind::Cores => "cores",
        },
    );
    if r.command.is_some() {
        y.key(
            "visible_devices",
            match r.visible_devices {
                VisibleDevices::All => "all",
                VisibleDevices::One => "one",
            },
        );
        y.key("local_rank_argument", r.local_rank_argument);
    }
    y.key("restarts", r.restarts);
    match r.min_hosts {
        MinHosts::All => y.key("min_hosts", "all"),
        MinHosts::AtLeast(n) => y.key("min_hosts", n),
    }
    y.key("grace_period", duration(r.grace_period_ms));
    y.key("hang_timeout", r.hang_timeout_ms.map_or_else(|| "off".to_owned(), duration));
    y.key("progress_pattern", r.progress_pattern.as_deref().map_or_else(|| "off".to_owned(), text));
    let Signals { usr1, usr2, term } = r.signals;
    let entry = |(name, action)| format!("{name}: {}", action_name(action));
    let named = [("SIGUSR1", usr1), ("SIGUSR2", usr2), ("SIGTERM", term)].map(entry);
    y.key("signals", format!("{{{}}}", named.join(", ")));
    y.section("logs", |y| {
        y.key("dir", text(&r.logs.dir));
        y.key("show", list(r.logs.show.iter().map(u32::to_string)));
        y.key("prefix", r.logs.prefix);
        y.key("max_size", format!("{}B", r.logs.max_size));
    });
}

fn action_name(action: SignalAction) -> &'static str {
    match action {
        SignalAction::Save => "save",
        SignalAction::SaveAndStop => "save_and_stop",
        SignalAction::Ignore => "ignore",
    }
}

fn print_train(y: &mut Yaml, t: &TrainSpec) {
    y.section("model", |y| print_model(y, &t.model));
    y.section("data", |y| print_data(y, &t.data));
    if let Some(l) = &t.lora {
        y.section("lora", |y| print_lora(y, l));
    }
    if t.experts != ExpertsSpec::default() {
        y.section("experts", |y| print_experts(y, &t.experts));
    }
    y.section("zero", |y| {
        y.key("stage", t.zero.stage);
        y.key("prefetch", t.zero.prefetch);
        y.key("max_live_parameters", t.zero.max_live_parameters);
        let offload = t.zero.offload.clone().map(PathBuf::from);
        let offload = offload.map(|p| format!("{{optimizer: {}}}", text(&p.to_string_lossy())));
        y.key("offload", offload.unwrap_or_else(|| "none".to_owned()));
    });
    y.key("precision", t.precision.name());
    if t.precision.is_bf16() {
        y.key("master_weights", t.master_weights);
    }
    if t.precision == Precision::Fp16 {
        y.section("loss_scale", |y| {
            y.key("initial_scale_power", t.loss_scale.initial_scale_power);
            y.key("loss_scale_window", t.loss_scale.loss_scale_window);
            y.key("min_loss_scale", number(t.loss_scale.min_loss_scale));
        });
    }
    y.section("batch", |y| {
        y.key("global", t.batch.global);
        y.key("micro", t.batch.micro);
    });
    y.section("optimizer", |y| print_optimizer(y, &t.optimizer));
    y.section("schedule", |y| print_schedule(y, &t.schedule));
    y.key("clip_norm", t.clip_norm.map_or_else(|| "off".to_owned(), number));
    y.key("steps", t.steps);
    y.key("seed", t.seed);
    y.key(
        "recompute",
        match t.recompute {
            Recompute::None => "none",
            Recompute::Block => "block",
        },
    );
    y.key("deterministic", t.deterministic);
    y.key("attention", t.attention.name());
    y.key("cuda_graphs", t.cuda_graphs.name());
    if !t.freeze.is_empty() {
        y.key("freeze", texts(&t.freeze));
    }
    if !t.train_only.is_empty() {
        y.key("train_only", texts(&t.train_only));
    }
    if let Some(eval) = &t.eval {
        y.section("eval", |y| print_evaluation(y, eval));
    }
}

fn print_data(y: &mut Yaml, d: &DataSpec) {
    match &d.sources[..] {
        [only] if only.name.is_empty() => print_source(y, only),
        sources => y.section("mixture", |y| {
            for s in sources {
                y.section(&s.name, |y| {
                    print_source(y, s);
                    y.key("weight", number(s.weight));
                });
            }
        }),
    }
    if let Some(path) = &d.chat_template {
        y.key("chat_template", text(&path.to_string_lossy()));
    }
    match &d.tokenizer {
        Tokenizer::Bytes => y.key("tokenizer", "bytes"),
        Tokenizer::File(path) => y.key("tokenizer", text(&path.to_string_lossy())),
    }
    y.key("seq_len", d.seq_len);
    y.key("pack", d.pack);
    y.key("shuffle", d.shuffle);
    y.key("held_out", number(d.held_out));
    y.key("cache", text(&d.cache.to_string_lossy()));
}

fn print_evaluation(y: &mut Yaml, eval: &EvalSpec) {
    y.key("every", eval.every);
    y.key("files", texts(&eval.files));
    y.key("samples", eval.samples);
    if let Some(sample) = &eval.sample {
        y.section("sample", |y| {
            y.key("prompt", text(&sample.prompt));
            y.key("tokens", sample.tokens);
            y.key("temperature", number(sample.temperature));
        });
    }
}

fn print_source(y: &mut Yaml, s: &DataSource) {
    y.key("files", texts(&s.files));
    y.key(
        "format",
        match s.format {
            Format::Text => "text",
            Format::Chat => "chat",
        },
    );
    y.key("field", text(&s.field));
    y.key(
        "loss_on",
        match s.loss_on {
            LossOn::All => "all",
            LossOn::Assistant => "assistant",
        },
    );
}

fn print_model(y: &mut Yaml, m: &ModelSpec) {
    if let Some(directory) = &m.from {
        y.key("from", text(&directory.to_string_lossy()));
        if let Some(rate) = m.dropout {
            y.key("dropout", number(rate));
        }
        return;
    }
    let or_auto = |n: u32| if n == 0 { "auto".to_owned() } else { n.to_string() };
    y.key("family", text(&m.family));
    if let Some(rate) = m.dropout {
        y.key("dropout", number(rate));
    }
    y.key("vocab_size", or_auto(m.vocab_size));
    y.key("hidden_size", m.hidden_size);
    y.key("intermediate_size", m.intermediate_size);
    y.key("num_hidden_layers", m.num_hidden_layers);
    y.key("num_attention_heads", m.num_attention_heads);
    y.key("num_key_value_heads", m.num_key_value_heads);
    y.key("head_dim", m.head_dim);
    let experts = [
        ("num_experts", m.num_experts),
        ("num_experts_per_tok", m.num_experts_per_tok),
        ("moe_intermediate_size", m.moe_intermediate_size),
    ];
    for (name, n) in experts.into_iter().filter_map(|(name, n)| Some((name, n?))) {
        y.key(name, n);
    }
    y.key("max_position_embeddings", or_auto(m.max_position_embeddings));
    if m.family != GPT2 {
        y.key("rms_norm_eps", number(m.rms_norm_eps));
        y.key("rope_theta", number(m.rope_theta));
    }
    y.key("tie_word_embeddings", m.tie_word_embeddings);
    y.key("initializer_range", number(m.initializer_range));
}

fn print_experts(y: &mut Yaml, e: &ExpertsSpec) {
    y.key("expert_parallel_size", e.expert_parallel_size);
    let mapping = |ranks: &std::collections::BTreeMap<u32, u32>| {
        let pairs: Vec<String> = ranks.iter().map(|(expert, rank)| format!("{expert}: {rank}")).collect();
        format!("{{{}}}", pairs.join(", "))
    };
    match &e.placement {
        ExpertPlacement::Balanced => y.key("placement", "balanced"),
        ExpertPlacement::Experts(ranks) => y.key("placement", mapping(ranks)),
        ExpertPlacement::Layers(layers) => y.section("placement", |y| {
            layers.iter().for_each(|(layer, ranks)| y.key(&layer.to_string(), mapping(ranks)));
        }),
    }
    if let Some(aux_loss) = e.aux_loss {
        y.key("aux_loss", number(aux_loss));
    }
    y.key("z_loss", number(e.z_loss));
}

fn print_lora(y: &mut Yaml, l: &LoraSpec) {
    match &l.from {
        Some(path) => y.key("from", text(&path.to_string_lossy())),
        None => {
            y.key("rank", l.rank);
            y.key("alpha", number(l.alpha));
            y.key("rslora", l.rslora);
            y.key(
                "targets",
                match &l.targets {
                    LoraTargets::AllLinear => "all-linear".to_owned(),
                    LoraTargets::Names(names) => texts(names),
                },
            );
        }
    }
    if let Some(dropout) = l.dropout {
        y.key("dropout", number(dropout));
    }
}

fn print_optimizer(y: &mut Yaml, o: &OptimizerSpec) {
    match o.name {
        OptimizerName::Adamw => {
            y.key("name", "adamw");
            y.key("betas", pair(o.betas));
            y.key("eps", number(o.eps));
        }
        OptimizerName::Sgd => {
            y.key("name", "sgd");
            y.key("momentum", number(o.momentum));
        }
        OptimizerName::Lion => {
            y.key("name", "lion");
            y.key("betas", pair(o.betas));
        }
        OptimizerName::Muon => {
            y.key("name", "muon");
            y.key("momentum", number(o.momentum));
            y.key("betas", pair(o.betas));
            y.key("eps", number(o.eps));
        }
    }
    y.key("lr", number(o.lr));
    y.key("weight_decay", number(o.weight_decay));
    y.key("no_decay", texts(&o.no_decay));
    if !o.groups.is_empty() {
        y.key("groups", list(o.groups.iter().map(group)));
    }
}

fn group(g: &GroupSpec) -> String {
    let mut parts = vec![format!("match: {}", texts(&g.r#match))];
    let numbers = [
        ("lr", g.lr),
        ("lr_scale", g.lr_scale),
        ("weight_decay", g.weight_decay),
        ("eps", g.eps),
        ("momentum", g.momentum),
    ];
    parts.extend(numbers.into_iter().filter_map(|(key, x)| Some(format!("{key}: {}", number(x?)))));
    parts.extend(g.betas.map(|b| format!("betas: {}", pair(b))));
    format!("{{{}}}", parts.join(", "))
}

fn pair((a, b): (f64, f64)) -> String {
    list([number(a), number(b)].into_iter())
}

fn print_schedule(y: &mut Yaml, s: &ScheduleSpec) {
    y.key(
        "name",
        match s.name {
            ScheduleName::Cosine => "cosine",
            ScheduleName::Linear => "linear",
            ScheduleName::Constant => "constant",
            ScheduleName::Wsd => "wsd",
        },
    );
    y.key("warmup_steps", s.warmup_steps);
    if s.name != ScheduleName::Constant {
        y.key("min_lr", number(s.min_lr));
    }
    if s.name == ScheduleName::Wsd {
        y.key("decay_steps", s.decay_steps);
    }
}

fn print_checkpoint(y: &mut Yaml, c: &CheckpointSpec) {
    y.key("dir", text(&c.dir.to_string_lossy()));
    match c.every {
        SaveInterval::Never => y.key("every", "never"),
        SaveInterval::Steps(n) => y.key("every", n),
        SaveInterval::Duration(ms) => y.key("every", duration(ms)),
    }
    y.key("keep", c.keep);
    y.key("async", c.r#async);
    y.key("parity", c.parity);
    y.key("require_shared", c.require_shared);
    y.key("gather_16bit_weights_on_model_save", c.gather_16bit_weights_on_model_save);
}

fn print_resume(y: &mut Yaml, r: &ResumeSpec) {
    match &r.from {
        ResumeFrom::Auto => y.key("from", "auto"),
        ResumeFrom::Never => y.key("from", "never"),
        ResumeFrom::Path(path) => y.key("from", text(&path.to_string_lossy())),
    }
    y.key(
        "rng",
        match r.rng {
            RngPolicy::Reconcile => "reconcile",
            RngPolicy::Strict => "strict",
            RngPolicy::Reseed => "reseed",
        },
    );
}

fn print_slurm(y: &mut Yaml, s: &SlurmSpec) {
    for (key, value) in [("partition", &s.partition), ("account", &s.account), ("qos", &s.qos)] {
        if let Some(value) = value {
            y.key(key, text(value));
        }
    }
    y.key("nodes", s.nodes);
    if let Some(ms) = s.time_ms {
        y.key("time", duration(ms));
    }
    y.key("gpus_per_node", s.gpus_per_node);
    if let Some(cpus) = s.cpus_per_task {
        y.key("cpus_per_task", cpus);
    }
    if let Some(bytes) = s.mem {
        y.key("mem", format!("{bytes}B"));
    }
    y.key("extra", texts(&s.extra));
    y.key("signal_time", duration(s.signal_time_ms));
    y.key("requeues", s.requeues);
    y.key("bcast", s.bcast);
}

/// A text as a YAML scalar: plain where it cannot be read as anything else, else in double quotes.
pub fn quote_yaml(plain: &str) -> String {
    text(plain)
}

fn text(text: &str) -> String {
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

fn texts(texts: &[String]) -> String {
    list(texts.iter().map(|t| text(t)))
}

fn list(items: impl Iterator<Item = String>) -> String {
    format!("[{}]", items.collect::<Vec<_>>().join(", "))
}

fn duration(ms: u64) -> String {
    if ms.is_multiple_of(1000) { format!("{}s", ms / 1000) } else { format!("{ms}ms") }
}

/// The shortest digits that are read as the same number.
fn number(x: f64) -> String {
    format!("{x:?}")
}
