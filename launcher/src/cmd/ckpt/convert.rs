//! `launch ckpt convert`: writes a checkpoint in another format, or for another ZeRO stage or world
//! size.
use super::{
    gather::{self, DtypeOption},
    open::open_checkpoint,
    output::{report_to_json, run_with_progress, write_stderr_line},
};
use crate::cmd::{
    option_value::{OptionValueError, parse_size},
    output::{print_json, print_line},
};
use ckpt::{ConvertOptions, ConvertTarget, Dtype, GatherOptions, TensorSource, UngroupedWeights};
use clap::{Args, ValueEnum};
use diagnostic::{
    Code, Diagnostic,
    codes::command,
    quantity::{format_bytes, format_count},
    terminal_text::filter_line,
};
use globset::{Glob, GlobMatcher};
use std::{collections::BTreeMap, path::PathBuf};

/// Arguments of `launch ckpt convert`.
#[derive(Debug, Args)]
pub(super) struct ConvertArgs {
    /// Checkpoint, or directory of checkpoints (the newest is used)
    #[arg(value_name = "CHECKPOINT")]
    dir: PathBuf,
    /// Directory to create
    out: PathBuf,
    /// Format to write
    #[arg(long, value_enum, value_name = "FORMAT")]
    to: TargetFormat,
    /// ZeRO stage to write, from 1 to 3; only with `--to native` and `--to deepspeed` [default:
    /// that of the source, or 2]
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=3))]
    stage: Option<u8>,
    /// World size to write for; not with `--to safetensors` [default: that of the source, or 1]
    #[arg(
        long,
        value_name = "N",
        alias = "world",
        value_parser = clap::value_parser!(u32).range(1..=65_536)
    )]
    world_size: Option<u32>,
    /// `sub_group_size` of the DeepSpeed configuration that will load a ZeRO-3 checkpoint; only
    /// with `--to deepspeed` [default: 1000000000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    sub_group_size: Option<u64>,
    /// Element type of the weights in DeepSpeed's model files or in `safetensors`; not with `--to
    /// native` [default: that of the source]
    #[arg(long, value_enum)]
    dtype: Option<DtypeOption>,
    /// Assign the parameters that match PATTERN to optimizer group N, counted from 0, if the
    /// checkpoint does not record their group; repeatable; parameters without a match are in
    /// group 0
    #[arg(long = "group", value_name = "PATTERN=N", value_parser = parse_group_rule)]
    groups: Vec<OptimizerGroupRule>,
    /// Memory limit, not counting the metadata of the result: 64MiB or more, or 256MB or more with
    /// `--to safetensors`
    #[arg(long, value_name = "SIZE", default_value = "512MB", value_parser = parse_memory_limit)]
    memory: u64,
    /// Replace a directory that an earlier conversion created
    #[arg(long)]
    force: bool,
}

/// The checkpoint formats that `--to` of `launch ckpt convert` can name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TargetFormat {
    /// Checkpoint of launch
    Native,
    /// DeepSpeed universal checkpoint
    Universal,
    /// Weights as a Hugging Face directory, without optimizer states
    Safetensors,
    /// DeepSpeed ZeRO checkpoint
    Deepspeed,
}

/// The smallest memory limit that `--memory` accepts, in bytes.
const MIN_MEMORY_BYTES: u64 = 64 << 20;
/// The smallest memory limit that `--memory` accepts together with `--to safetensors`, in bytes.
const MIN_GATHER_MEMORY_BYTES: u64 = 256_000_000;

/// Parses the value of `--memory` and returns the limit in bytes. Fails if the limit is less than
/// [`MIN_MEMORY_BYTES`].
fn parse_memory_limit(text: &str) -> Result<u64, OptionValueError> {
    match parse_size(text)? {
        bytes if bytes < MIN_MEMORY_BYTES => Err(OptionValueError::MemoryTooSmall),
        bytes => Ok(bytes),
    }
}

/// The value of one `--group PATTERN=N` option, which assigns all parameters whose names match the
/// pattern to the optimizer's parameter group N.
#[derive(Clone, Debug)]
struct OptimizerGroupRule {
    pattern: GlobMatcher,
    group: usize,
}

/// Parses the value `PATTERN=N` of `--group`: a glob pattern and the number of an optimizer group.
fn parse_group_rule(text: &str) -> Result<OptimizerGroupRule, OptionValueError> {
    let (pattern, group) = text
        .rsplit_once('=')
        .and_then(|(pattern, group)| Some((pattern, group.parse().ok()?)))
        .filter(|(pattern, _)| !pattern.is_empty())
        .ok_or(OptionValueError::GroupRule)?;
    let glob = Glob::new(pattern).map_err(|error| OptionValueError::Pattern(error.kind().clone()))?;
    Ok(OptimizerGroupRule { pattern: glob.compile_matcher(), group })
}

/// Determines the optimizer's parameter group from the `--group` rules for each parameter whose
/// group is not recorded in the checkpoint. Returns the group of each parameter whose name a rule
/// matches.
///
/// Fails if the checkpoint records all groups, if a rule matches no parameter or names a group that
/// does not exist, or if two rules match one parameter.
fn assign_optimizer_groups(
    source: &dyn TensorSource,
    rules: &[OptimizerGroupRule],
) -> diagnostic::Result<BTreeMap<String, usize>> {
    let mut assigned: BTreeMap<String, &OptimizerGroupRule> = BTreeMap::new();
    if rules.is_empty() {
        return Ok(BTreeMap::new());
    }
    let reject = |message: String, help: &str| {
        Err(option_error(command::CONVERT_GROUP_INVALID, "--group", message).with_help(help))
    };
    let UngroupedWeights { names, groups } = ckpt::find_ungrouped_weights(source)?;
    if names.is_empty() {
        let message = "the checkpoint records the group of every parameter".to_owned();
        return reject(message, "leave the option out");
    }
    for rule in rules {
        let pattern = rule.pattern.glob();
        if rule.group >= groups {
            let last = groups - 1;
            let message = format!(
                "`{pattern}={}` names a group that does not exist: groups are 0 to {last}",
                rule.group
            );
            return reject(message, "`launch ckpt inspect` shows the groups");
        }
        let mut matches = names.iter().filter(|name| rule.pattern.is_match(name)).peekable();
        if matches.peek().is_none() {
            let examples = names.iter().take(3).cloned().collect::<Vec<_>>().join(", ");
            let message = format!("the pattern `{pattern}` matches no parameter without a group");
            return reject(message, &format!("such parameters are for example {}", filter_line(&examples)));
        }
        for name in matches {
            if let Some(other) = assigned.insert(name.clone(), rule) {
                let (other, name) = (other.pattern.glob(), filter_line(name));
                let message = format!("the patterns `{other}` and `{pattern}` both match {name}");
                let help = "use patterns that do not overlap, or one with alternatives: \
                            '{*norm*,*.bias}=1'";
                return reject(message, help);
            }
        }
    }
    Ok(assigned.into_iter().map(|(name, rule)| (name, rule.group)).collect())
}

/// Creates an error with the message `message` that concerns the command-line option `option` of
/// `launch ckpt convert`.
fn option_error(code: Code, option: &str, message: String) -> Diagnostic {
    Diagnostic::error(code, message).with_subject(option)
}

/// Fails if an option of `launch ckpt convert` does not fit the output format, or if the `--memory`
/// limit is too small to write the output.
fn check_options(args: &ConvertArgs) -> diagnostic::Result<()> {
    let weights_only = args.to == TargetFormat::Safetensors;
    let unsupported = |option: &str, reason: &str| {
        let message = format!("`{option}` cannot be used with this format: {reason}");
        Err(option_error(command::CONVERT_OPTION_UNSUPPORTED, option, message)
            .with_help("see `launch ckpt convert --help`"))
    };
    for (option, is_given) in [("--stage", args.stage.is_some()), ("--world-size", args.world_size.is_some())]
    {
        if weights_only && is_given {
            return unsupported(option, "`--to safetensors` writes weights, which are not sharded");
        }
    }
    if weights_only && !args.groups.is_empty() {
        return unsupported("--group", "`--to safetensors` writes weights, which have no groups");
    }
    if args.stage.is_some() && args.to == TargetFormat::Universal {
        return unsupported("--stage", "`--to universal` writes a checkpoint for every ZeRO stage");
    }
    if args.dtype.is_some() && args.to == TargetFormat::Native {
        return unsupported("--dtype", "`--to native` keeps the element types of the source");
    }
    if args.sub_group_size.is_some() && args.to != TargetFormat::Deepspeed {
        return unsupported("--sub-group-size", "only `--to deepspeed` has sub-groups");
    }
    if weights_only && args.memory < MIN_GATHER_MEMORY_BYTES {
        let message = "`--to safetensors` needs 256 MB of memory".to_owned();
        return Err(option_error(command::CONVERT_MEMORY_TOO_SMALL, "--memory", message)
            .with_field("required_bytes", MIN_GATHER_MEMORY_BYTES)
            .with_field("memory_bytes", args.memory)
            .with_help("raise `--memory`"));
    }
    Ok(())
}

/// Runs `launch ckpt convert`: writes the converted checkpoint and prints the path of the result.
pub(super) fn run(args: ConvertArgs, json: bool) -> diagnostic::Result<u8> {
    check_options(&args)?;
    let dtype = args.dtype.map(Dtype::from);
    let target = match args.to {
        TargetFormat::Native => ConvertTarget::Native,
        TargetFormat::Universal => ConvertTarget::Universal,
        TargetFormat::Deepspeed => ConvertTarget::DeepSpeed,
        TargetFormat::Safetensors => {
            write_stderr_line(format_args!("note: optimizer states are left out"));
            let options = GatherOptions { dtype, force: args.force, ..GatherOptions::default() };
            return gather::write_weights(&args.dir, &args.out, &options, json);
        }
    };
    let found = open_checkpoint(&args.dir)?;
    let source = found.tensor_source();
    let defaults = ConvertOptions::new(target);
    let options = ConvertOptions {
        groups: assign_optimizer_groups(source, &args.groups)?,
        target,
        stage: args.stage,
        world: args.world_size,
        sub_group_size: args.sub_group_size.unwrap_or(defaults.sub_group_size),
        dtype,
        memory: args.memory,
        force: args.force,
    };
    let report = run_with_progress("converting", |progress| {
        ckpt::convert_checkpoint(source, &args.out, &options, progress)
    })?;
    for notice in &report.notices {
        write_stderr_line(format_args!("note: {notice}"));
    }
    if json {
        return print_json(&report_to_json(&report));
    }
    let stage = report.stage.map_or("all stages".into(), |s| format!("stage {s}"));
    let reused = match report.reused {
        0 => String::new(),
        n => format!(", {n} of them from an earlier run"),
    };
    write_stderr_line(format_args!(
        "converted step {} for {stage} and {}: {} in {}{reused}",
        report.step,
        format_count(report.world, "rank"),
        format_bytes(report.bytes),
        format_count(report.files, "file"),
    ));
    print_line(report.path.display())
}
