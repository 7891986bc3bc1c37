//! `launch shims`: creates links to the executable `launch` under the names of other launchers,
//! such as `torchrun`.
use super::{
    context::CommandContext,
    drop_in::LauncherProgram,
    output::{path_error, print_json, print_line},
};
use clap::Args;
use diagnostic::{Diagnostic, codes::command};
use serde_json::json;
use std::{
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

/// Arguments of `launch shims`.
#[derive(Debug, Args)]
pub(crate) struct ShimsArgs {
    /// Directory of the links, which is created if it does not exist
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

/// Runs `launch shims`: creates links to launch under the names of other launchers, and prints how
/// to use them.
pub(crate) fn run(args: ShimsArgs, context: &CommandContext) -> diagnostic::Result<u8> {
    let executable = std::env::current_exe().map_err(|error| {
        Diagnostic::error(command::EXECUTABLE_UNKNOWN, "cannot determine the path of launch")
            .with_cause(&error)
    })?;
    let names: Vec<&str> = LauncherProgram::ALL.iter().map(|program| program.name).collect();
    let links = create_links(&executable, &args.dir, &names)?;
    let directory = std::path::absolute(&args.dir).unwrap_or(args.dir);
    let links: Vec<String> = links.iter().map(|link| link.display().to_string()).collect();
    if context.format.json {
        return print_json(&json!({ "links": links, "executable": executable.display().to_string() }));
    }
    print_line(format!("created {}", links.join(", ")))?;
    print_line(format!("to use them: export PATH={}:$PATH", directory.display()))
}

/// Creates, in `dir`, links to `executable` with the names `names` of other launchers. Existing
/// links to `executable`, or to a file of the same name, are replaced. Fails before anything is
/// created if another file has one of the names.
fn create_links(executable: &Path, dir: &Path, names: &[&str]) -> diagnostic::Result<Vec<PathBuf>> {
    let links: Vec<PathBuf> = names.iter().map(|name| dir.join(name)).collect();
    if let Some(other) = links.iter().find(|link| !may_create_link(link, executable)) {
        let message = format!("{} exists and is not a link of launch", other.display());
        return Err(Diagnostic::error(command::SHIM_EXISTS, message)
            .with_subject(other.display().to_string())
            .with_help("use another directory, and put it before the others in PATH"));
    }
    let failed =
        |path: &Path, error: &io::Error| path_error(command::SHIM_FAILED, "cannot create", path, error);
    fs::create_dir_all(dir).map_err(|error| failed(dir, &error))?;
    for link in &links {
        let removed = fs::remove_file(link);
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(link, &error)),
            _ => symlink(executable, link).map_err(|error| failed(link, &error))?,
        }
    }
    Ok(links)
}

/// Returns whether nothing exists at the path `link`, or only a symbolic link to a file named like
/// `executable`, which may be replaced.
fn may_create_link(link: &Path, executable: &Path) -> bool {
    match fs::symlink_metadata(link) {
        Err(error) => error.kind() == io::ErrorKind::NotFound,
        Ok(_) => fs::read_link(link).is_ok_and(|target| target.file_name() == executable.file_name()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_created_and_replaced_but_other_files_are_kept() {
        let directory = tempfile::tempdir().expect("a directory");
        let (bin, executable) = (directory.path().join("a/b"), directory.path().join("launch"));
        for _ in 0..2 {
            let links = create_links(&executable, &bin, &["torchrun", "deepspeed"]).expect("created");
            assert_eq!(fs::read_link(&links[1]).expect("a link"), executable);
        }
        let other = bin.join("accelerate");
        for make in [|path: &Path| fs::write(path, "x"), |path: &Path| symlink("/usr/bin/env", path)] {
            make(&other).expect("created");
            fs::remove_file(bin.join("torchrun")).expect("removed");
            let error = create_links(&executable, &bin, &["torchrun", "accelerate"]).expect_err("a file");
            assert_eq!(error.code(), command::SHIM_EXISTS);
            assert!(!bin.join("torchrun").exists(), "nothing was created");
            fs::remove_file(&other).expect("removed");
            create_links(&executable, &bin, &["torchrun"]).expect("created");
        }
    }
}
