//! `launch ckpt`: look into checkpoints, verify them, gather their weights. The only file of the launcher that reads
//! checkpoints. stdout is data, stderr is talk.
use ckpt::{Checkpoint, CkptError, Dtype, GatherOptions, Newest, Role, TensorInfo, VerifyReport};
use clap::{Args, Subcommand, ValueEnum};
use contract::exit;
use serde_json::{Value, json};
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Arguments of `launch ckpt`.
#[derive(Debug, Args)]
pub(crate) struct CkptArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// What is in a checkpoint
    Inspect {
        /// A checkpoint, or a directory of them: then its newest
        dir: PathBuf,
    },
    /// Check every byte of a checkpoint, or of all in a directory; exit code 4 when something is damaged
    Verify {
        /// A checkpoint, or a directory of them
        path: PathBuf,
    },
    /// Write the weights as a Hugging Face folder
    Gather {
        /// A checkpoint, or a directory of them: then its newest
        dir: PathBuf,
        /// The folder to make
        out: PathBuf,
        /// Element type to write; as stored when not given
        #[arg(long, value_enum)]
        dtype: Option<Precision>,
        /// A new file is begun before one would exceed this size
        #[arg(long, default_value = "5GB", value_parser = size)]
        max_shard_size: u64,
        /// Replace a folder that was made by gathering
        #[arg(long)]
        force: bool,
    },
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Precision {
    Bf16,
    Fp16,
    Fp32,
}

/// Runs `launch ckpt …`; returns the exit code.
pub(crate) fn run(args: CkptArgs, json: bool) -> u8 {
    let result = match args.command {
        Command::Inspect { dir } => inspect(&dir, json),
        Command::Verify { path } => verify(&path, json),
        Command::Gather { dir, out, dtype, max_shard_size, force } => {
            let dtype = dtype.map(|d| match d {
                Precision::Bf16 => Dtype::BF16,
                Precision::Fp16 => Dtype::F16,
                Precision::Fp32 => Dtype::F32,
            });
            gather(&dir, &out, &GatherOptions { dtype, max_shard_size, force }, json)
        }
    };
    result.unwrap_or_else(|failure| {
        say(format_args!("error: {failure}"));
        failure.code()
    })
}

/// Why a command ended early.
enum Failure {
    Ckpt(CkptError),
    /// The reader of stdout is gone or full.
    Output(io::Error),
}

impl Failure {
    fn code(&self) -> u8 {
        match self {
            Failure::Ckpt(e) if e.is_checkpoint_at_fault() => exit::CHECKPOINT,
            Failure::Ckpt(CkptError::Refused { .. }) => exit::USAGE,
            // `launch ckpt inspect DIR | head` is no failure
            Failure::Output(e) if e.kind() == io::ErrorKind::BrokenPipe => exit::DONE,
            Failure::Ckpt(_) | Failure::Output(_) => exit::FAILED,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Ckpt(e) => e.fmt(f),
            Failure::Output(e) => write!(f, "can't write to stdout: {e}"),
        }
    }
}

impl From<CkptError> for Failure {
    fn from(e: CkptError) -> Failure {
        Failure::Ckpt(e)
    }
}

impl From<io::Error> for Failure {
    fn from(e: io::Error) -> Failure {
        Failure::Output(e)
    }
}

/// Talk; a closed stderr is nobody listening.
fn say(line: fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Data.
fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// The checkpoint meant by a path, saying which one and what was passed over.
fn open(path: &Path) -> Result<Checkpoint, Failure> {
    let Newest { checkpoint, skipped } = ckpt::newest(path)?;
    for e in skipped {
        say(format_args!("warning: passed over: {e}"));
    }
    if checkpoint.path() != path {
        say(format_args!("using {}", checkpoint.path().display()));
    }
    Ok(checkpoint)
}

fn inspect(dir: &Path, json: bool) -> Result<u8, Failure> {
    let checkpoint = open(dir)?;
    let facts = checkpoint.facts();
    if json {
        let tensors: Vec<Value> = checkpoint
            .tensors()
            .map(|t| json!({"name": t.name, "role": t.role, "dtype": t.dtype, "shape": t.shape, "bytes": t.bytes()}))
            .collect();
        let files: Vec<Value> =
            checkpoint.files().map(|(name, bytes)| json!({"name": name, "bytes": bytes})).collect();
        let all = json!({
            "kind": "native", "path": checkpoint.path(), "step": facts.step, "world": facts.world, "stage": facts.stage,
            "tokens": facts.tokens, "run_seed": facts.run_seed, "program": facts.program, "family": facts.model.family,
            "bytes": checkpoint.bytes(), "files": files, "tensors": tensors, "ties": facts.model.ties,
            "frozen": facts.model.frozen, "groups": facts.groups, "cursor": facts.cursor, "rng": facts.rng,
            "tokenizer": facts.tokenizer.iter().map(|t| t.name.as_str()).collect::<Vec<_>>(),
            "config": facts.model.hf_config, "job": facts.job, "missing": missing(&checkpoint),
        });
        print(&format!("{all}\n"))?;
    } else {
        print(&described(&checkpoint))?;
    }
    Ok(exit::DONE)
}

/// What a full training state has and this checkpoint has not.
fn missing(checkpoint: &Checkpoint) -> Vec<&'static str> {
    let facts = checkpoint.facts();
    let optimizer = checkpoint.tensors().any(|t| t.role.is_optimizer_state());
    let parts = [
        ("optimizer state", optimizer),
        ("optimizer groups", !facts.groups.is_null()),
        ("data cursor", !facts.cursor.is_null()),
        ("rng facts", !facts.rng.is_null()),
        ("job", !facts.job.is_null()),
        ("tokenizer", !facts.tokenizer.is_empty()),
    ];
    parts.into_iter().filter(|(_, there)| !there).map(|(name, _)| name).collect()
}

/// Facts, then a table of the tensors.
fn described(checkpoint: &Checkpoint) -> String {
    let facts = checkpoint.facts();
    let tensors: Vec<TensorInfo> = checkpoint.tensors().collect();
    let mut lines = vec![
        ("path", checkpoint.path().display().to_string()),
        ("kind", "native".to_owned()),
        ("step", facts.step.to_string()),
        ("world", facts.world.to_string()),
        ("stage", facts.stage.to_string()),
        ("tokens", facts.tokens.to_string()),
        ("family", facts.model.family.clone()),
        ("bytes", format!("{} ({})", checkpoint.bytes(), human(checkpoint.bytes()))),
        ("program", facts.program.clone()),
    ];
    for role in Role::ALL {
        let of_role: Vec<&TensorInfo> = tensors.iter().filter(|t| t.role == role).collect();
        if !of_role.is_empty() {
            let elements: u64 = of_role.iter().map(|t| t.elements()).sum();
            lines.push((role.name(), format!("{} tensors, {elements} elements", of_role.len())));
        }
    }
    let ties: Vec<String> = facts.model.ties.iter().map(|t| format!("{} = {}", t.alias, t.target)).collect();
    lines.push(("ties", if ties.is_empty() { "none".into() } else { ties.join(", ") }));
    lines.push(("groups", facts.groups.to_string()));
    lines.push(("cursor", facts.cursor.to_string()));
    lines.push(("rng", facts.rng.to_string()));
    let missing = missing(checkpoint);
    lines.push(("missing", if missing.is_empty() { "nothing".into() } else { missing.join(", ") }));
    let mut text: String =
        lines.iter().map(|(key, value)| format!("{key:<10}  {}\n", clean(value))).collect();
    text.push('\n');
    text.push_str(&table(&tensors));
    text
}

/// Aligned columns: role, dtype, shape, name.
fn table(tensors: &[TensorInfo]) -> String {
    let shape = |t: &TensorInfo| t.shape.iter().map(u64::to_string).collect::<Vec<_>>().join(" × ");
    let mut rows = vec![["ROLE".to_owned(), "DTYPE".to_owned(), "SHAPE".to_owned(), "NAME".to_owned()]];
    rows.extend(tensors.iter().map(|t| {
        let scalar = if t.shape.is_empty() { "scalar".to_owned() } else { shape(t) };
        [t.role.to_string(), t.dtype.to_string(), scalar, clean(&t.name)]
    }));
    let width = |column: usize| rows.iter().map(|r| r[column].chars().count()).max().unwrap_or(0);
    let (a, b, c) = (width(0), width(1), width(2));
    rows.iter()
        .map(|[role, dtype, shape, name]| format!("{role:<a$}  {dtype:<b$}  {shape:<c$}  {name}\n"))
        .collect()
}

/// What comes from a file must not steer the terminal.
fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

fn verify(path: &Path, json: bool) -> Result<u8, Failure> {
    let report = ckpt::verify(path)?;
    if json {
        let mut value = serde_json::to_value(&report).unwrap_or(Value::Null);
        value["sound"] = report.is_sound().into();
        print(&format!("{value}\n"))?;
    } else {
        print(&verdict(&report))?;
    }
    for note in &report.notes {
        say(format_args!("note: {}", clean(note)));
    }
    Ok(if report.is_sound() { exit::DONE } else { exit::CHECKPOINT })
}

/// One line per checkpoint and problem.
fn verdict(report: &VerifyReport) -> String {
    let mut text = String::new();
    for c in &report.checkpoints {
        let (path, size) = (c.path.display(), human(c.bytes));
        text.push_str(&match c.problems.len() {
            0 => format!("sound    {path}  {} blocks, {size}\n", c.blocks),
            1 => format!("DAMAGED  {path}  1 problem\n"),
            n => format!("DAMAGED  {path}  {n} problems\n"),
        });
        text.extend(c.problems.iter().map(|p| format!("         {}\n", clean(&p.to_string()))));
    }
    for p in &report.problems {
        text.push_str(&format!("DAMAGED  {}\n         {}\n", report.path.display(), clean(&p.to_string())));
    }
    text
}

fn gather(dir: &Path, out: &Path, options: &GatherOptions, json: bool) -> Result<u8, Failure> {
    let checkpoint = open(dir)?;
    let mut progress = Progress { shown: None, live: io::stderr().is_terminal() };
    let gathered = ckpt::gather(&checkpoint, out, options, |done, total| progress.show(done, total));
    progress.end();
    let gathered = gathered?;
    let step = checkpoint.facts().step;
    if json {
        let mut value = serde_json::to_value(&gathered).unwrap_or(Value::Null);
        value["step"] = step.into();
        print(&format!("{value}\n"))?;
    } else {
        let (tensors, files) = (gathered.tensors, gathered.files.len());
        say(format_args!(
            "{tensors} tensors of step {step} as {}, {} in {files} file(s)",
            gathered.dtype,
            human(gathered.bytes)
        ));
        print(&format!("{}\n", gathered.path.display()))?;
    }
    Ok(exit::DONE)
}

/// A line on a terminal that is drawn again at most ten times a second.
struct Progress {
    shown: Option<Instant>,
    live: bool,
}

impl Progress {
    fn show(&mut self, done: u64, total: u64) {
        let due = self.shown.is_none_or(|t| t.elapsed() >= Duration::from_millis(100));
        if self.live && due {
            self.shown = Some(Instant::now());
            let _ = write!(io::stderr(), "\r\x1b[Kgathering {} of {}", human(done), human(total));
        }
    }

    fn end(&self) {
        if self.shown.is_some() {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

/// `5GB`, `500MB`, `2GiB` or a number of bytes.
fn size(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is no size; write for example 5GB, 500MB or 2GiB");
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..digits].parse().map_err(|_| wrong())?;
    let unit: u64 = match text[digits..].trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        _ => return Err(wrong()),
    };
    let bytes = number * unit as f64;
    if !(1.0..1e18).contains(&bytes) {
        return Err(wrong());
    }
    Ok(bytes as u64)
}

/// `1234567` as `1.23 MB`.
fn human(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["kB", "MB", "GB", "TB", "PB"];
    let (mut value, mut unit) = (bytes as f64 / 1e3, 0);
    if bytes < 1000 {
        return format!("{bytes} B");
    }
    while value >= 999.95 && unit + 1 < UNITS.len() {
        value /= 1e3;
        unit += 1;
    }
    format!("{value:.2} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        assert_eq!(size("5GB"), Ok(5_000_000_000));
        assert_eq!(size("1.5 MiB"), Ok(1_572_864));
        assert_eq!(size("4096"), Ok(4096));
        for wrong in ["", "GB", "0", "5XB", "-1GB", "1e9", "nan", "99999999TB"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn tables_are_aligned_and_names_cannot_steer_the_terminal() {
        let t = |role, shape: &[u64], name: &str| TensorInfo {
            name: name.into(),
            role,
            dtype: Dtype::F32,
            shape: shape.into(),
        };
        let text = table(&[t(Role::Weight, &[16, 8], "a\x1b[2J"), t(Role::ExpAvgSq, &[], "b")]);
        assert_eq!(
            text,
            "ROLE        DTYPE  SHAPE   NAME\nweight      F32    16 × 8  a\u{fffd}[2J\nexp_avg_sq  F32    scalar  b\n"
        );
    }

    /// A checkpoint of step 3 with one weight of 4 elements and no optimizer state.
    fn saved(root: &Path) -> PathBuf {
        let staging = ckpt::Staging::begin(root, 3, 16).expect("begun");
        let piece =
            ckpt::Piece { name: "w", role: Role::Weight, start_element: 0, data: &[1.0, 2.0, 3.0, 1e6] };
        let report = ckpt::write_shard(staging.path(), 0, 1, &[piece]).expect("written");
        let model = json!({
            "family": "llama", "hf_config": {}, "weights": [{"name": "w", "shape": [2, 2]}],
            "ties": [{"alias": "head", "target": "w"}],
        });
        let facts = json!({
            "step": 3, "world": 1, "stage": 2, "run_seed": 1, "tokens": 77, "program": "launch test",
            "cursor": {"epoch": 1}, "rng": null, "groups": [{"lr": 0.1}], "model": model, "tokenizer": [], "job": null,
        });
        let facts = serde_json::from_value(facts).expect("facts");
        ckpt::commit(staging, facts, vec![report]).expect("complete").path
    }

    #[test]
    fn a_description_says_what_is_there_and_what_is_missing() {
        let dir = tempfile::tempdir().expect("a directory");
        let checkpoint = Checkpoint::open(&saved(dir.path())).expect("complete");
        let text = described(&checkpoint);
        for line in [
            "step        3\n",
            "stage       2\n",
            "weight      1 tensors, 4 elements\n",
            "ties        head = w\n",
            "groups      [{\"lr\":0.1}]\n",
            "cursor      {\"epoch\":1}\n",
            "missing     optimizer state, rng facts, job, tokenizer\n",
            "\nROLE    DTYPE  SHAPE  NAME\nweight  F32    2 × 2  w\n",
        ] {
            assert!(text.contains(line), "{text} lacks {line}");
        }
    }

    #[test]
    fn every_outcome_has_its_exit_code() {
        let dir = tempfile::tempdir().expect("a directory");
        let root = dir.path().join("checkpoints");
        let path = saved(&root);
        let out = dir.path().join("out");
        let run = |command| run(CkptArgs { command }, true);
        let gather = |dtype, force| Command::Gather {
            dir: root.clone(),
            out: out.clone(),
            dtype,
            max_shard_size: 1 << 30,
            force,
        };
        assert_eq!(run(Command::Inspect { dir: root.clone() }), exit::DONE);
        assert_eq!(run(Command::Verify { path: root.clone() }), exit::DONE);
        assert_eq!(run(gather(Some(Precision::Fp16), false)), exit::FAILED, "1e6 is no fp16");
        assert_eq!(run(gather(Some(Precision::Bf16), false)), exit::DONE);
        assert_eq!(run(gather(Some(Precision::Bf16), false)), exit::USAGE, "not overwritten");
        assert_eq!(run(gather(None, true)), exit::DONE);
        std::fs::write(path.join("shard-00000-of-00001.safetensors"), "cut").expect("written");
        assert_eq!(run(Command::Verify { path: root.clone() }), exit::CHECKPOINT);
        assert_eq!(run(Command::Inspect { dir: path }), exit::CHECKPOINT);
        assert_eq!(run(gather(None, true)), exit::CHECKPOINT);
        assert_eq!(run(Command::Inspect { dir: dir.path().join("nowhere") }), exit::CHECKPOINT);
        let report = ckpt::verify(&root).expect("there");
        let text = verdict(&report);
        assert!(text.starts_with("DAMAGED") && text.contains("it is cut short: 3 bytes of"), "{text}");
    }
}
