//! `launch quickstart`: writes a job file for a small model and the text to train on, so that a
//! user can try launch without other files.
use super::{
    context::CommandContext,
    output::{path_error, print_json, print_line},
};
use crate::{format::quote_shell_words, private_files::read_without_blocking, runs::replace_output_file};
use clap::Args;
use diagnostic::{Diagnostic, codes, codes::command};
use serde_json::json;
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// The text of the example job in the repository, which trains on the files of the repository.
const EXAMPLE_JOB_TEXT: &str = include_str!("../../../configs/quickstart.yaml");
/// The line of the example job from which on `launch quickstart` copies the job, without the
/// comments before this line.
const FIRST_JOB_KEY: &str = "name: quickstart\n";
/// The start of the line in the example job that lists the training files, which `launch
/// quickstart` replaces by a line with its own text file.
const FILES_LINE_PREFIX: &str = "    files: ";
/// The start of the line in the example job that sets the share of held-out text, which `launch
/// quickstart` replaces by a larger share.
const HELD_OUT_LINE_PREFIX: &str = "    held_out: ";
/// The name of the job file that `launch quickstart` writes.
const JOB_FILE: &str = "job.yaml";
/// The name of the file with training text that `launch quickstart` writes.
const TEXT_FILE: &str = "corpus.jsonl";
/// The permissions of the files that `launch quickstart` writes.
const FILE_MODE: u32 = 0o644;
/// The comment at the beginning of the job file that `launch quickstart` writes.
const JOB_FILE_HEADER: &str = "\
# Trains a small byte-level Llama on the descriptions of launch's errors, sharded over two workers. The
# job takes less than a minute on two cores:
#   launch job.yaml
# Run the command in the directory of this file, because relative paths start at the current directory.
";

/// Arguments of `launch quickstart`.
#[derive(Debug, Args)]
pub(crate) struct QuickstartArgs {
    /// Directory of the files, which is created if it does not exist
    #[arg(value_name = "DIR", default_value = "quickstart")]
    dir: PathBuf,
}

/// Runs `launch quickstart`: writes the job and its text, and prints how to start the job.
pub(crate) fn run(args: QuickstartArgs, context: &CommandContext) -> diagnostic::Result<u8> {
    let files = write_files(&args.dir)?;
    let names: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
    if context.format.json {
        return print_json(&json!({ "directory": args.dir.display().to_string(), "files": names }));
    }
    print_line(format!("wrote {}", names.join(" and ")))?;
    let directory = quote_shell_words(&[args.dir.display().to_string()]);
    print_line(format!("to train: cd {directory} && launch {JOB_FILE}"))
}

/// Writes the job file and the training text of `launch quickstart` to `dir`, and returns their
/// paths. Keeps files that have the same content. Fails before anything is written if a file with
/// other content exists.
fn write_files(dir: &Path) -> diagnostic::Result<Vec<PathBuf>> {
    let contents = [(JOB_FILE, build_job_text()), (TEXT_FILE, build_training_text())];
    let failed =
        |path: &Path, error: &io::Error| path_error(command::OUTPUT_FAILED, "cannot write", path, error);
    let mut missing = Vec::new();
    for (name, content) in &contents {
        let path = dir.join(name);
        // A longer file, or a pipe or a device, has other content.
        match read_without_blocking(&path, content.len() as u64 + 1) {
            Ok(known) if known == content.as_bytes() => {}
            Ok(_) => return Err(build_file_exists_error(&path)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => missing.push((path, content)),
            Err(error) => return Err(failed(&path, &error)),
        }
    }
    fs::create_dir_all(dir).map_err(|error| failed(dir, &error))?;
    for (path, content) in missing {
        let absolute = std::path::absolute(&path).map_err(|error| failed(&path, &error))?;
        let written = replace_output_file(&absolute, content.as_bytes(), FILE_MODE);
        written.map_err(|error| failed(&path, &error))?;
    }
    Ok(contents.iter().map(|(name, _)| dir.join(name)).collect())
}

/// Creates the error that `launch quickstart` would replace an existing file.
fn build_file_exists_error(path: &Path) -> Diagnostic {
    let path = path.display().to_string();
    Diagnostic::error(command::QUICKSTART_EXISTS, format!("{path} exists and has other content"))
        .with_subject(path)
        .with_help("name another directory: `launch quickstart DIR`")
}

/// Returns the text of the job file that `launch quickstart` writes: launch's example job, changed
/// to train on [`TEXT_FILE`].
fn build_job_text() -> String {
    let start = EXAMPLE_JOB_TEXT.find(FIRST_JOB_KEY).unwrap_or(0);
    let lines = EXAMPLE_JOB_TEXT[start..].lines().map(|line| {
        if line.starts_with(FILES_LINE_PREFIX) {
            format!("{FILES_LINE_PREFIX}[{TEXT_FILE}]\n")
        } else if line.starts_with(HELD_OUT_LINE_PREFIX) {
            // The text is short, and the evaluations need 64 samples.
            format!("{HELD_OUT_LINE_PREFIX}0.1\n")
        } else {
            format!("{line}\n")
        }
    });
    format!("{JOB_FILE_HEADER}{}", lines.collect::<String>())
}

/// Returns the training text for `launch quickstart`, in which each record is the explanation of
/// one diagnostic code of launch.
fn build_training_text() -> String {
    let record = |code| {
        let text = format!("{}\n", diagnostic::render_code_entry(code).trim());
        format!("{}\n", json!({ "text": text }))
    };
    codes::all_codes().map(record).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_job_trains_on_the_written_text() {
        let directory = tempfile::tempdir().expect("a directory");
        let dir = directory.path().join("a/b");
        let files = write_files(&dir).expect("written");
        assert_eq!(files, [dir.join("job.yaml"), dir.join("corpus.jsonl")]);
        let text = fs::read_to_string(&files[0]).expect("a job");
        let source = jobspec::JobSource::Text { name: "job.yaml".to_owned(), text };
        let (job, _, warnings) = jobspec::load_job(source, &[]).expect("a valid job");
        let train = job.train.expect("built-in training");
        assert_eq!(train.data.sources[0].files, [TEXT_FILE]);
        assert_eq!(
            (train.steps, train.data.held_out.to_string(), warnings.len()),
            (400, "0.1".to_owned(), 0)
        );
        let length = fs::metadata(&files[1]).expect("a text").len();
        assert!((100_000..1_000_000).contains(&length), "{length} bytes");
    }

    #[test]
    fn changed_files_are_kept() {
        let directory = tempfile::tempdir().expect("a directory");
        let files = write_files(directory.path()).expect("written");
        write_files(directory.path()).expect("the same files");
        fs::write(&files[0], "name: mine\n").expect("written");
        fs::remove_file(&files[1]).expect("removed");
        let error = write_files(directory.path()).expect_err("a changed job");
        assert_eq!(error.code(), command::QUICKSTART_EXISTS);
        assert_eq!(fs::read_to_string(&files[0]).expect("kept"), "name: mine\n");
        assert!(!files[1].exists(), "nothing was written");
        fs::remove_file(&files[0]).expect("removed");
        nix::unistd::mkfifo(&files[0], nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        let error = write_files(directory.path()).expect_err("a pipe");
        assert_eq!(error.code(), command::QUICKSTART_EXISTS);
    }
}
