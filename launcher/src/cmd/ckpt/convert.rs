//! `launch ckpt convert`.
use super::describe::{clean, human};
use super::{Failure, Precision, Progress, gather, open, print, say, size};
use ckpt::{ConvertOptions, Dtype, Found, GatherOptions, Source, Target, Ungrouped};
use clap::{Args, ValueEnum};
use contract::exit;
use globset::{Glob, GlobMatcher};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Arguments of `launch ckpt convert`.
#[derive(Debug, Args)]
pub(super) struct ConvertArgs {
    /// A checkpoint as for inspect, or a directory of them: then its newest
    dir: PathBuf,
    /// The folder to make
    out: PathBuf,
    /// The format to write
    #[arg(long, value_enum)]
    to: Format,
    /// ZeRO stage to write; that of the source when not given
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=3))]
    stage: Option<u8>,
    /// Number of ranks to write for; that of the source when not given
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    world: Option<u32>,
    /// `sub_group_size` of the config that will load a ZeRO-3 checkpoint; 1,000,000,000 when not given
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    sub_group_size: Option<u64>,
    /// Type of the model's own copies of its weights; that of the source when not given
    #[arg(long, value_enum)]
    dtype: Option<Precision>,
    /// Parameters whose names match PATTERN are in group N of the optimizer, counted from 0, where the checkpoint doesn't say it;
    /// of those, what no pattern matches is in group 0. May be given several times
    #[arg(long = "group", value_name = "PATTERN=N", value_parser = rule)]
    groups: Vec<Rule>,
    /// Memory to use at most, 64 MiB or more
    #[arg(long, default_value = "512MB", value_parser = memory)]
    memory: u64,
    /// Replace a folder that was made by converting
    #[arg(long)]
    force: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// A checkpoint of ours
    Native,
    /// DeepSpeed's universal format
    Universal,
    /// Weights as a Hugging Face folder, without optimizer states
    Safetensors,
    /// A ZeRO checkpoint as DeepSpeed writes it
    Deepspeed,
}

/// Least memory that converting works with, bytes.
const MEMORY_MIN: u64 = 64 << 20;
/// What gathering may need, bytes.
const GATHERING: u64 = 256_000_000;

/// A size that is memory enough.
fn memory(text: &str) -> Result<u64, String> {
    match size(text)? {
        bytes if bytes < MEMORY_MIN => Err("converting needs 64MiB of memory or more".into()),
        bytes => Ok(bytes),
    }
}

/// One `--group`.
#[derive(Clone, Debug)]
struct Rule {
    pattern: GlobMatcher,
    group: usize,
}

fn rule(text: &str) -> Result<Rule, String> {
    let (pattern, group) = text
        .rsplit_once('=')
        .and_then(|(pattern, group)| Some((pattern, group.parse().ok()?)))
        .filter(|(pattern, _)| !pattern.is_empty())
        .ok_or("give a pattern of names and the number of a group, such as '*norm*=1'")?;
    let pattern = Glob::new(pattern).map_err(|e| format!("bad pattern: {}", e.kind()))?.compile_matcher();
    Ok(Rule { pattern, group })
}

/// The group of each parameter that a rule matches. Each rule has a use, and none says anything twice.
fn grouped(source: &dyn Source, rules: &[Rule]) -> Result<BTreeMap<String, usize>, Failure> {
    let mut all: BTreeMap<String, &Rule> = BTreeMap::new();
    if rules.is_empty() {
        return Ok(BTreeMap::new());
    }
    let refused = |why: String| Err(Failure::Usage(format!("--group: {why}")));
    let Ungrouped { names, groups } = ckpt::ungrouped(source)?;
    if names.is_empty() {
        return refused("the checkpoint leaves no parameter's group open: leave the option out".into());
    }
    for rule in rules {
        let pattern = rule.pattern.glob();
        if rule.group >= groups {
            let last = groups - 1;
            return refused(format!("{pattern}={}: the checkpoint has the groups 0 to {last}", rule.group));
        }
        let mut matched = names.iter().filter(|name| rule.pattern.is_match(name)).peekable();
        if matched.peek().is_none() {
            let some = names.iter().take(3).cloned().collect::<Vec<_>>().join(", ");
            return refused(format!(
                "the pattern `{pattern}` matches no parameter whose group is open; those are like {}",
                clean(&some)
            ));
        }
        for name in matched {
            if let Some(other) = all.insert(name.clone(), rule) {
                return refused(format!(
                    "both `{}` and `{pattern}` match {}: give patterns that don't overlap, or one with alternatives \
                     ('{{*norm*,*.bias}}=1')",
                    other.pattern.glob(),
                    clean(name)
                ));
            }
        }
    }
    Ok(all.into_iter().map(|(name, rule)| (name, rule.group)).collect())
}

/// Refuses what has no meaning for the format that is asked for.
fn check(args: &ConvertArgs) -> Result<(), Failure> {
    let weights = args.to == Format::Safetensors;
    let refused = |why: String| Err(Failure::Usage(format!("{why} (see launch ckpt convert --help)")));
    for (option, given) in [("--stage", args.stage.is_some()), ("--world", args.world.is_some())] {
        if weights && given {
            return refused(format!(
                "{option} has no meaning for --to safetensors: weights alone aren't cut"
            ));
        }
    }
    if weights && !args.groups.is_empty() {
        return refused("--group has no meaning for --to safetensors: weights alone have no groups".into());
    }
    if args.sub_group_size.is_some() && args.to != Format::Deepspeed {
        return refused("--sub-group-size has a meaning for --to deepspeed alone".into());
    }
    if weights && args.memory < GATHERING {
        return refused("--to safetensors may need 256MB of memory: --memory can't be less".into());
    }
    Ok(())
}

/// Runs it; returns the exit code.
pub(super) fn run(args: &ConvertArgs, json: bool) -> Result<u8, Failure> {
    check(args)?;
    let dtype = args.dtype.map(|d| match d {
        Precision::Bf16 => Dtype::BF16,
        Precision::Fp16 => Dtype::F16,
        Precision::Fp32 => Dtype::F32,
    });
    let to = match args.to {
        Format::Native => Target::Native,
        Format::Universal => Target::Universal,
        Format::Deepspeed => Target::DeepSpeed,
        Format::Safetensors => {
            say(format_args!("note: optimizer states are left out"));
            let options = GatherOptions { dtype, force: args.force, ..GatherOptions::default() };
            return gather(&args.dir, &args.out, &options, json);
        }
    };
    let found = open(&args.dir)?;
    let source: &dyn Source = match &found {
        Found::Native(newest) => &newest.checkpoint,
        Found::Foreign(foreign) => &**foreign,
    };
    let defaults = ConvertOptions::to(to);
    let options = ConvertOptions {
        groups: grouped(source, &args.groups)?,
        to,
        stage: args.stage,
        world: args.world,
        sub_group_size: args.sub_group_size.unwrap_or(defaults.sub_group_size),
        dtype,
        memory: args.memory,
        force: args.force,
    };
    let mut progress = Progress::of("converting");
    let done = ckpt::convert(source, &args.out, &options, |done, total| progress.show(done, total));
    progress.end();
    let done = done?;
    for notice in &done.notices {
        say(format_args!("note: {}", clean(notice)));
    }
    if json {
        print(&format!("{}\n", serde_json::to_value(&done).unwrap_or(Value::Null)))?;
        return Ok(exit::DONE);
    }
    let stage = done.stage.map_or("all stages".into(), |s| format!("stage {s}"));
    let kept = match done.reused {
        0 => String::new(),
        n => format!(", {n} of them from an earlier run"),
    };
    say(format_args!(
        "step {} for {stage} and {} rank(s): {} in {} files{kept}",
        done.step,
        done.world,
        human(done.bytes),
        done.files
    ));
    print(&format!("{}\n", done.path.display()))?;
    Ok(exit::DONE)
}
