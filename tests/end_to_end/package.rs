//! Checks that `scripts/package` builds an archive with everything that an installation needs.

use crate::support::{
    self,
    environment::{LAUNCH_EXECUTABLE, create_test_directory, isolated_command},
};
use std::{fs, os::unix::fs::PermissionsExt, path::Path};

/// Files of the archive, relative to its prefix.
const INSTALLED_FILES: &[&str] = &[
    "bin/launch",
    "share/man/man1/launch.1",
    "share/man/man1/launch-run.1",
    "share/man/man1/launch-ckpt-convert.1",
    "share/bash-completion/completions/launch",
    "share/zsh/site-functions/_launch",
    "share/fish/vendor_completions.d/launch.fish",
    "share/doc/launch/LICENSE",
    "share/doc/launch/configs/quickstart.yaml",
];

/// Runs a shell script in `directory` and returns its stdout. Panics if the script fails.
fn run_shell(directory: &Path, script: &str) -> String {
    let output = isolated_command("bash", directory).args(["-euc", script]).output().expect("bash runs");
    assert!(output.status.success(), "{script}: {}", support::output_to_text(&output));
    String::from_utf8(output.stdout).expect("UTF-8")
}

#[test]
fn a_package_installs_the_executable_its_man_pages_completions_and_documents() {
    let directory = create_test_directory();
    // a script in place of the executable, which would take seconds to compress
    let executable = directory.path().join("launch");
    fs::write(&executable, format!("#!/bin/sh\nexec \"{LAUNCH_EXECUTABLE}\" \"$@\"\n")).expect("written");
    fs::set_permissions(&executable, fs::Permissions::from_mode(0o755)).expect("executable");
    let script = concat!("'", env!("CARGO_MANIFEST_DIR"), "/scripts/package' --executable launch out");
    let archive = run_shell(directory.path(), script);
    let install = format!(
        "cd out && sha256sum --check --quiet *.sha256\n\
         mkdir ../prefix && tar -xzf '{}' -C ../prefix --strip-components=1",
        archive.trim()
    );
    run_shell(directory.path(), &install);
    let prefix = directory.path().join("prefix");
    for file in INSTALLED_FILES {
        let length = fs::metadata(prefix.join(file)).unwrap_or_else(|error| panic!("{file}: {error}")).len();
        assert!(length > 0, "{file} is empty");
    }
    let version = run_shell(&prefix, "bin/launch --version");
    assert_eq!(version.trim(), concat!("launch ", env!("CARGO_PKG_VERSION")));
    run_shell(&prefix, ". share/bash-completion/completions/launch; complete -p launch");
    let documents = prefix.join("share/doc/launch");
    let readme = fs::read_to_string(documents.join("README.md")).expect("README.md");
    let links = readme.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
    let dead: Vec<_> = links.filter(|link| !link.contains("://") && !documents.join(link).exists()).collect();
    assert!(dead.is_empty(), "README.md links to files that are not in the package: {dead:?}");
}
