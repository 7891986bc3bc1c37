//! `launch import`: other launchers' settings as a job.yaml on stdout, and notes on stderr.
use crate::{
    cli::{ImportArgs, ImportFrom},
    error::{Failure, Kind},
    import::{self, Beside, Imported, Refused},
    report::plain,
};
use contract::{
    hosts::MAX_HOSTFILE,
    job::{Document, Syntax},
};
use serde_json::json;
use std::{fs::File, io::Read, path::Path};

/// Prints the job, then what it doesn't say; the exit code.
pub(crate) fn run(args: &ImportArgs, as_json: bool) -> u8 {
    match imported(&args.from) {
        Ok(Imported { job, notes }) if as_json => {
            let object = json!({ "job": job, "notes": notes });
            super::show(&format!("{object}\n"))
        }
        Ok(Imported { job, notes }) => {
            let code = super::show(&job);
            plain::say(&notes.iter().map(|note| format!("{note}\n")).collect::<String>());
            code
        }
        Err(failure) => super::fail(&failure),
    }
}

fn imported(from: &ImportFrom) -> Result<Imported, Failure> {
    let refused = |file: &str| {
        let file = file.to_owned();
        move |problems: Refused| {
            let message = format!("{file} has {} problems; no job was made of it", problems.len());
            Failure { problems, ..Failure::new(Kind::Job, message) }
        }
    };
    let document = |file: &Path, syntax| {
        Document::read(file, syntax).map_err(|problem| refused(&file.display().to_string())(vec![*problem]))
    };
    match from {
        ImportFrom::Accelerate(args) => {
            let name = args.file.display().to_string();
            let is_json = args.file.extension().is_some_and(|e| e == "json");
            let document = document(&args.file, if is_json { Syntax::Json } else { Syntax::Yaml })?;
            hosts(args.hostfile.as_deref())?;
            let beside = Beside { hostfile: args.hostfile.as_deref(), program: &args.program };
            import::accelerate(&document, &beside).map_err(refused(&name))
        }
        ImportFrom::Deepspeed(args) => {
            let name = args.file.display().to_string();
            let document = document(&args.file, Syntax::Json)?;
            let text = hosts(args.hostfile.as_deref())?;
            let beside = Beside { hostfile: args.hostfile.as_deref(), program: &args.program };
            import::deepspeed(&document, text.as_deref(), &beside).map_err(refused(&name))
        }
        ImportFrom::Torchrun(args) => {
            hosts(args.hostfile.as_deref())?;
            let beside = Beside { hostfile: args.hostfile.as_deref(), program: &[] };
            import::torchrun(&args.arguments, &beside).map_err(refused("torchrun's command line"))
        }
    }
}

/// The hostfile, which must be one.
fn hosts(file: Option<&Path>) -> Result<Option<String>, Failure> {
    let Some(file) = file else { return Ok(None) };
    let wrong = |why: String| {
        Failure::new(Kind::Usage, format!("the hostfile {} can't be used: {why}", file.display()))
            .hint("a line is `host slots=N`, as DeepSpeed and Open MPI have it")
    };
    let mut text = String::new();
    let read = File::open(file).and_then(|f| f.take(MAX_HOSTFILE as u64 + 1).read_to_string(&mut text));
    read.map_err(|error| wrong(error.to_string()))?;
    if text.len() > MAX_HOSTFILE {
        return Err(wrong("it is larger than 4 MiB".to_owned()));
    }
    contract::hosts::parse_hostfile(&text).map_err(|faults| {
        let first = faults.first().map(|f| format!("line {}: {}", f.line, f.message));
        wrong(first.unwrap_or_default())
    })?;
    Ok(Some(text))
}
