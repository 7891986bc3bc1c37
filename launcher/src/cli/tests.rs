//! Tests of the command line: defaults, positions of options, help and errors.
use super::*;
use crate::cmd::run_args::RunArgs;

/// Parses the command line `launch ARGS…`.
fn parse_words(args: &[&str]) -> ParsedArgs {
    parse_command_line(std::iter::once("launch").chain(args.iter().copied()).map(OsString::from))
}

/// Parses a command line that must be valid. Panics if the arguments are rejected.
fn parse_valid_command(args: &[&str]) -> Cli {
    match parse_words(args) {
        ParsedArgs::Command(cli) => *cli,
        other => panic!("{args:?}: {other:?}"),
    }
}

/// Parses a command line that must run a job. Returns the arguments of `launch run` and whether
/// `--json` is set. Panics for other commands.
fn parse_run_command(args: &[&str]) -> (RunArgs, bool) {
    match parse_valid_command(args) {
        Cli { command: LaunchCommand::Run(run), json, .. } => (run, json),
        other => panic!("{args:?}: {other:?}"),
    }
}

/// Parses a command line that must be invalid and returns the error. Panics if the arguments
/// are valid.
fn expect_usage_error(args: &[&str]) -> Diagnostic {
    match parse_words(args) {
        ParsedArgs::Invalid(error, _) => error,
        other => panic!("accepted: {other:?}"),
    }
}

#[test]
fn the_definition_of_the_command_line_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn run_is_the_default_command() {
    for args in [
        &["a.yaml", "--set", "x=1", "--dry-run"][..],
        &["run", "a.yaml", "--set", "x=1", "--dry-run"],
        &["--set", "x=1", "--dry-run", "a.yaml"],
        &["--json", "--dry-run", "--set=x=1", "a.yaml"],
        &["--json-schema", "1", "--dry-run", "--set=x=1", "a.yaml"],
    ] {
        let (run, json) = parse_run_command(args);
        assert_eq!(
            (run.job.as_deref().and_then(std::path::Path::to_str), run.set, run.dry_run),
            (Some("a.yaml"), vec!["x=1".to_owned()], true)
        );
        assert_eq!(json, args.contains(&"--json"));
    }
}

#[test]
fn a_program_needs_no_job_file() {
    for (args, workers) in [
        (&["run", "--", "python", "train.py", "--json", "-x"][..], None),
        (&["--workers", "4", "--", "python", "train.py", "--json", "-x"], Some(4)),
        (&["run", "--workers=4", "--", "python", "train.py", "--json", "-x"], Some(4)),
        (&["run", "--nproc_per_node=4", "--", "python", "train.py", "--json", "-x"], Some(4)),
    ] {
        let (run, json) = parse_run_command(args);
        assert_eq!((run.job, run.workers, json), (None, workers, false));
        assert_eq!(run.command, ["python", "train.py", "--json", "-x"]);
    }
    for args in [
        &["run", "a.yaml", "--", "true"][..],
        &["run", "a.yaml", "--workers", "2"],
        &["run", "--workers", "0", "--", "true"],
        &["run", "--"],
    ] {
        assert_eq!(expect_usage_error(args).code(), command::USAGE, "{args:?}");
    }
}

#[test]
fn options_may_precede_the_command() {
    for args in [&["plan", "a.yaml", "--json"][..], &["--json", "plan", "a.yaml"]] {
        assert!(
            matches!(parse_valid_command(args), Cli { command: LaunchCommand::Plan(_), json: true, .. }),
            "{args:?}"
        );
    }
    for args in [&["--json-schema", "1", "events"][..], &["events", "--json-schema=1"]] {
        assert_eq!(parse_valid_command(args).json_schema, Some(EventSchema::V1), "{args:?}");
    }
    assert_eq!(parse_valid_command(&["events"]).json_schema, None);
    for args in [&["-vv", "plan", "a.yaml"][..], &["plan", "a.yaml", "-v", "--verbose"], &["-vv", "a.yaml"]] {
        assert_eq!(parse_valid_command(args).verbose, 2, "{args:?}");
    }
    assert!(matches!(parse_valid_command(&["agent"]), Cli { command: LaunchCommand::Agent(_), .. }));
}

#[test]
fn help_lists_every_public_command() {
    let ParsedArgs::Print(version) = parse_words(&["--version"]) else { panic!("no version") };
    assert_eq!(version.split_whitespace().next(), Some("launch"));
    let ParsedArgs::Print(help) = parse_words(&["--help"]) else { panic!("no help") };
    insta::assert_snapshot!("help", help);
}

#[test]
fn gpu_check_is_an_ordinary_command() {
    for args in [
        &["--json", "gpu-check", "--model", "2", "--tiny"][..],
        &["gpu-check", "--tiny", "--model=2", "--json"],
    ] {
        let Cli { command: LaunchCommand::GpuCheck(check), json, .. } = parse_valid_command(args) else {
            panic!("{args:?}: another command");
        };
        assert_eq!(
            (json, check.device, check.model, check.tiny, check.quick),
            (true, 0, Some(2), true, false)
        );
    }
}

#[test]
fn a_missing_command_has_its_own_code() {
    for args in [&[][..], &["--json"], &["import"], &["--json", "ckpt"]] {
        assert_eq!(expect_usage_error(args).code(), command::COMMAND_MISSING, "{args:?}");
    }
    let error = expect_usage_error(&["import"]);
    let expected = serde_json::json!(["accelerate", "deepspeed", "torchrun"]);
    assert_eq!(error.field("subcommands"), Some(&expected));
}

#[test]
fn wrong_arguments_are_one_line_with_a_suggestion() {
    let mut lines = String::new();
    for args in [
        &["a.yaml", "--jsno"][..],
        &["a.yaml", "b.yaml"],
        &["a.yaml", "--set"],
        &["plan"],
        &["plna", "a.yaml"],
        &["job"],
        &["a.yaml", "--set", "x=1", "--json=3"],
        &["a.yaml", "--json-schema", "3"],
        &["run", "a.yaml", "--", "true"],
        &["run", "--workers", "0", "--", "true"],
        &["logs", "--rank", "x"],
        &["ckpt", "convert", "a", "b", "--to", "zip"],
        &["gpu-check", "--device", "x"],
        &["gpu-check", "--ops", "--profile", "0"],
    ] {
        let error = expect_usage_error(args);
        assert_eq!(error.code(), command::USAGE, "{args:?}");
        assert!(!error.message().contains('\n'), "{args:?}: {error}");
        lines += &format!("launch {}\n{}\n", args.join(" "), diagnostic::render(&error, false));
    }
    insta::assert_snapshot!("wrong_arguments", lines);
}

#[test]
fn wrong_arguments_are_reported_in_the_requested_format() {
    let json = |args: &[&str]| match parse_words(args) {
        ParsedArgs::Invalid(_, format) => format.json,
        other => panic!("accepted: {other:?}"),
    };
    assert!(json(&["--json", "plan"]) && !json(&["plan"]));
}
