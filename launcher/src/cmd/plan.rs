//! `launch plan`: what would run where; touches nothing. Also the text of `--dry-run`.
use super::prepare::{Asked, Prepared, prepare};
use crate::secrets::{HIDDEN, hide};
use crate::{cli::JobArgs, error::Failure, report::plain};
use contract::{
    Source,
    control::{HostPlan, WorkerPlan},
    ids::RunId,
    job::EnvSource,
    preflight::{MemoryEstimate, TrainJudge},
    problem::{Severity, render},
};
use serde_json::{Map, Value, json};
use std::fmt::Write;

/// Shows the plan; the exit code.
pub(crate) fn run(args: &JobArgs, json: bool, judge: &dyn TrainJudge) -> u8 {
    let asked = Asked { source: Source::File(args.job.clone()), set: args.set.clone() };
    match prepare(&asked, &unnamed_run(), judge) {
        Ok(prepared) => show(&prepared, json, false),
        Err(failure) => super::fail(&failure),
    }
}

/// Shows the plan and the whole job; the exit code.
pub(crate) fn dry_run(asked: &Asked, json: bool, judge: &dyn TrainJudge) -> Result<u8, Failure> {
    prepare(asked, &unnamed_run(), judge).map(|prepared| show(&prepared, json, true))
}

/// The run that isn't started has no name yet.
fn unnamed_run() -> RunId {
    RunId("{run}".to_owned())
}

fn show(prepared: &Prepared, json: bool, with_job: bool) -> u8 {
    plain::say(&render(&prepared.warnings, Severity::Warning, plain::color()));
    if json {
        return super::show(&format!("{}\n", as_json(prepared)));
    }
    let mut text = as_text(prepared);
    if with_job {
        _ = write!(text, "\n# the whole job\n{}", hide(&prepared.job).to_yaml());
    }
    super::show(&text)
}

/// The plan as one object.
pub(crate) fn as_json(p: &Prepared) -> Value {
    let memory = |rank: u32| p.verdict.iter().flat_map(|v| &v.memory).find(|m| m.rank == rank);
    let devices = devices(p);
    let ranks: Vec<Value> = workers_with_hosts(p)
        .map(|(host, w)| {
            json!({
                "rank": w.rank,
                "host": host,
                "local_rank": w.local_rank,
                "device": devices.get(w.rank as usize),
                "cpus": w.cpus,
                "threads": w.threads,
                "env": w.env.iter().map(|(n, v)| (n.clone(), Value::from(readable(n, v)))).collect::<Map<_, _>>(),
                "workdir": w.workdir,
                "command": w.command,
                "log": w.log,
                "memory": memory(w.rank).map(|m| json!({
                    "total": m.total,
                    "parts": m.parts.iter().map(|(n, b)| (n.clone(), Value::from(*b))).collect::<Map<_, _>>(),
                })),
            })
        })
        .collect();
    let warnings: Vec<Value> = p
        .warnings
        .iter()
        .map(|w| json!({"path": w.path, "file": w.place.file(), "line": w.place.line(), "column": w.place.column(), "message": w.message, "hint": w.hint}))
        .collect();
    json!({
        "name": p.job.name,
        "world": p.plan.world,
        "run_dir": p.plan.run_dir,
        "checkpoint_dir": checkpoint_dir(p),
        "host": {"name": p.facts.host, "cpus": p.facts.cpus, "quota": p.facts.quota, "memory": p.facts.memory},
        "parameters": p.verdict.as_ref().map(|v| v.parameters),
        "ranks": ranks,
        "warnings": warnings,
        "job": hide(&p.job),
    })
}

/// The plan for a person.
pub(crate) fn as_text(p: &Prepared) -> String {
    let mut text = String::new();
    // Writing to a String can't fail.
    let world = p.plan.world;
    let workers_word = if world == 1 { "worker" } else { "workers" };
    let place = match &p.plan.hosts[..] {
        [one] => one.clone(),
        several => format!("{} hosts", several.len()),
    };
    _ = writeln!(text, "job {}: {world} {workers_word} on {place}", p.job.name);
    match &p.job.run.command {
        Some(command) => _ = writeln!(text, "command: {}", shell_words(command)),
        None => _ = writeln!(text, "command: the built-in training"),
    }
    _ = writeln!(text, "workdir: {}", p.job.run.workdir.display());
    _ = writeln!(text, "run directory: {}", p.plan.run_dir.display());
    if let Some(dir) = checkpoint_dir(p) {
        _ = writeln!(text, "checkpoints: {}", dir.display());
    }
    _ = write!(text, "\n{}", table(&rank_rows(p)));
    _ = write!(text, "\n{}", environment(p));
    if let (Some(verdict), Some(train)) = (&p.verdict, &p.job.train) {
        let n = verdict.parameters;
        _ = writeln!(text, "\nmodel: {}, {} parameters", train.model.family, grouped(n));
        _ = writeln!(text, "ZeRO stage {}, {} samples a step", train.zero.stage, train.batch.global);
        let (whose, installed) =
            if p.job.cluster.trains_on_gpus() { ("GPU memory", 0) } else { ("memory", p.facts.memory) };
        _ = write!(text, "{}", memory(&verdict.memory, whose, installed));
    }
    text
}

fn workers(p: &Prepared) -> impl Iterator<Item = &WorkerPlan> {
    p.plan.nodes.iter().flat_map(|n| &n.workers)
}

/// Each with the name of its host.
fn workers_with_hosts(p: &Prepared) -> impl Iterator<Item = (&str, &WorkerPlan)> {
    let nodes = p.plan.hosts.iter().zip(&p.plan.nodes);
    nodes.flat_map(|(host, node)| node.workers.iter().map(move |w| (host.as_str(), w)))
}

/// What a person calls the device of each rank.
fn devices(p: &Prepared) -> Vec<String> {
    let of_node = |(target, node): (&crate::controller::HostTarget, &HostPlan)| {
        let facts = super::targets::promised(target, &p.facts).facts;
        crate::plan::device_labels(&p.job, &facts, node.workers.len() as u32)
    };
    p.hosts.iter().zip(&p.plan.nodes).flat_map(of_node).collect()
}

/// Where checkpoints go; `None` when the job doesn't save by itself.
fn checkpoint_dir(p: &Prepared) -> Option<std::path::PathBuf> {
    p.job.train.as_ref().map(|_| p.job.run.workdir.join(&p.job.checkpoint.dir))
}

fn rank_rows(p: &Prepared) -> Vec<Vec<String>> {
    let head = ["rank", "host", "local rank", "device", "cpus", "threads", "memory"];
    let columns = if p.verdict.is_some() { head.len() } else { head.len() - 1 };
    let mut rows = vec![head[..columns].iter().map(|h| (*h).to_owned()).collect::<Vec<_>>()];
    let devices = devices(p);
    for (host, w) in workers_with_hosts(p) {
        let memory = p.verdict.iter().flat_map(|v| &v.memory).find(|m| m.rank == w.rank);
        let mut row = vec![
            w.rank.to_string(),
            host.to_owned(),
            w.local_rank.to_string(),
            devices.get(w.rank as usize).cloned().unwrap_or_default(),
            if w.cpus.is_empty() { "any".to_owned() } else { ranges(&w.cpus) },
            w.threads.to_string(),
            memory.map_or_else(|| "-".to_owned(), |m| bytes(m.total)),
        ];
        row.truncate(columns);
        rows.push(row);
    }
    rows
}

/// Columns padded to their widest cell.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, &w)| format!("{cell:<w$}")).collect();
        _ = writeln!(text, "{}", cells.join("  ").trim_end());
    }
    text
}

/// The environment: what is the same for all, then what differs by rank.
fn environment(p: &Prepared) -> String {
    let mut text = "environment of each worker:\n".to_owned();
    let all: Vec<&WorkerPlan> = workers(p).collect();
    let Some(first) = all.first() else { return text };
    for (name, value) in &first.env {
        let differs = all.iter().any(|w| !w.env.contains(&(name.clone(), value.clone())));
        let shown = if differs {
            "(by rank)".to_owned()
        } else {
            readable(name, value).replace(char::is_control, "\u{fffd}")
        };
        _ = writeln!(text, "  {name}={shown}");
    }
    for (name, source) in &p.job.run.env_from {
        _ = match source {
            EnvSource::FromEnv(from) => writeln!(text, "  {name}=(the value of {from}, not shown)"),
            EnvSource::FromFile(path) => {
                writeln!(text, "  {name}=(the text of {}, not shown)", path.display())
            }
        };
    }
    for name in p.secrets.passed() {
        _ = writeln!(text, "  {name}=(launch's own, by run.pass_env, not shown)");
    }
    text
}

/// A value, unless its name says that nobody may read it.
fn readable<'a>(name: &str, value: &'a str) -> &'a str {
    if contract::env::looks_secret(name) && !value.is_empty() { HIDDEN } else { value }
}

/// The largest rank's memory with its parts, and all ranks' beside the machine's.
fn memory(estimates: &[MemoryEstimate], whose: &str, installed: u64) -> String {
    let mut text = String::new();
    let Some(largest) = estimates.iter().max_by_key(|m| m.total) else { return text };
    _ = writeln!(text, "{whose} of rank {} (the largest): {}", largest.rank, bytes(largest.total));
    let rows: Vec<Vec<String>> =
        largest.parts.iter().map(|(name, n)| vec![format!("  {name}"), bytes(*n)]).collect();
    text.push_str(&table(&rows));
    let total = estimates.iter().map(|m| m.total).sum();
    let of = if installed == 0 { String::new() } else { format!(" of {}", bytes(installed)) };
    _ = writeln!(text, "{whose} of all ranks: {}{of}", bytes(total));
    text
}

/// A command as a shell would be told it.
pub(crate) fn shell_words(words: &[String]) -> String {
    let simple =
        |w: &str| !w.is_empty() && w.chars().all(|c| c.is_ascii_alphanumeric() || "_-./:=,@%+".contains(c));
    let quoted = |w: &String| match simple(w) {
        true => w.clone(),
        false => format!("'{}'", w.replace('\'', "'\\''").replace(char::is_control, "\u{fffd}")),
    };
    words.iter().map(quoted).collect::<Vec<_>>().join(" ")
}

/// `0-3,8`.
fn ranges(cpus: &[u32]) -> String {
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for &cpu in cpus {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == cpu => *last = cpu,
            _ => parts.push((cpu, cpu)),
        }
    }
    let text = |(a, b): &(u32, u32)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    parts.iter().map(text).collect::<Vec<_>>().join(",")
}

/// `512 B`, `1.5 MiB`.
pub(crate) fn bytes(n: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let step = (n.max(1).ilog2() / 10) as usize;
    match step {
        0 => format!("{n} B"),
        _ => format!("{:.1} {}", n as f64 / (1u64 << (10 * step)) as f64, units[step]),
    }
}

/// `1,234,567`.
fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prepared(text: &str, verdict: Option<contract::preflight::Verdict>) -> Prepared {
        let source = contract::Source::Text { name: "demo.yaml".to_owned(), text: text.to_owned() };
        let (job, _, warnings) = contract::load(source, &[]).expect("a job");
        let facts = crate::discover::Facts {
            host: "node".to_owned(),
            cpus: (0..8).collect(),
            memory: 8 << 30,
            topology: contract::machine::Topology::flat(&(0..8).collect::<Vec<_>>()),
            ..Default::default()
        };
        let hosts = super::super::targets::of(&job, &facts).expect("hosts");
        let promised: Vec<_> = hosts.iter().map(|h| super::super::targets::promised(h, &facts)).collect();
        let epoch = crate::plan::Epoch::default();
        let plan = crate::plan::plan(&job, &promised, &unnamed_run(), &epoch).expect("a plan");
        let secrets = crate::secrets::Secrets::default();
        Prepared { job, facts, hosts, plan, secrets, verdict, warnings }
    }

    fn verdict() -> contract::preflight::Verdict {
        let estimate = |rank, total| MemoryEstimate {
            rank,
            parts: vec![("activations".to_owned(), total - 1024), ("process".to_owned(), 1024)],
            total,
        };
        contract::preflight::Verdict {
            parameters: 1_234_567,
            memory: vec![estimate(0, 3 << 20), estimate(1, 2 << 20)],
            ..Default::default()
        }
    }

    const TRAIN: &str =
        "cluster: {workers_per_host: 2}\nrun: {workdir: /w, env: {A: b}}\ntrain: {data: {files: [a]}}";

    #[test]
    fn a_plan_as_text() {
        let expected = "\
job demo: 2 workers on node
command: the built-in training
workdir: /w
run directory: /w/runs/demo/{run}
checkpoints: /w/runs/demo/checkpoints

rank  host  local rank  device  cpus  threads  memory
0     node  0           cpu     0-3   4        3.0 MiB
1     node  1           cpu     4-7   4        2.0 MiB

environment of each worker:
  RANK=(by rank)
  LOCAL_RANK=(by rank)
  WORLD_SIZE=2
  LOCAL_WORLD_SIZE=2
  MASTER_ADDR=127.0.0.1
  MASTER_PORT=auto
  OMP_NUM_THREADS=4
  A=b

model: llama, 1,234,567 parameters
ZeRO stage 3, 64 samples a step
memory of rank 0 (the largest): 3.0 MiB
  activations  3.0 MiB
  process      1.0 KiB
memory of all ranks: 5.0 MiB of 8.0 GiB
";
        assert_eq!(as_text(&prepared(TRAIN, Some(verdict()))), expected);
    }

    #[test]
    fn where_a_secret_comes_from_is_shown() {
        let job = "run: {command: [a], env: {K: {from_env: KEY}, F: {from_file: f.txt}}}";
        let text = as_text(&prepared(job, None));
        assert!(
            text.contains("  K=(the value of KEY, not shown)\n  F=(the text of f.txt, not shown)\n"),
            "{text}"
        );
    }

    #[test]
    fn a_plan_as_json_has_the_same() {
        let plan = as_json(&prepared(TRAIN, Some(verdict())));
        assert_eq!(plan["parameters"], 1_234_567);
        assert_eq!(plan["checkpoint_dir"], "/w/runs/demo/checkpoints");
        assert_eq!(plan["ranks"][1]["env"]["RANK"], "1");
        assert_eq!(plan["ranks"][1]["cpus"], json!([4, 5, 6, 7]));
        assert_eq!(plan["ranks"][0]["memory"]["parts"]["process"], 1024);
        let plan = as_json(&prepared("run: {command: [a]}", None));
        assert!(plan["checkpoint_dir"].is_null() && plan["ranks"][0]["memory"].is_null());
        assert_eq!(plan["ranks"][0]["command"], json!(["a"]));
    }

    #[test]
    fn commands_are_quoted() {
        let words = ["sh", "-c", "echo it's", "", "--lr=3e-4"].map(str::to_owned);
        assert_eq!(shell_words(&words), r"sh -c 'echo it'\''s' '' --lr=3e-4");
    }

    #[test]
    fn numbers_for_people() {
        assert_eq!(ranges(&[0, 1, 2, 4, 8, 9]), "0-2,4,8-9");
        assert_eq!((bytes(0), bytes(1023), bytes(1536)), ("0 B".into(), "1023 B".into(), "1.5 KiB".into()));
        assert_eq!(bytes(u64::MAX), "16.0 EiB");
        assert_eq!(
            (grouped(7), grouped(1234), grouped(1_234_567)),
            ("7".into(), "1,234".into(), "1,234,567".into())
        );
    }
}
