//! Checks that `scripts/package` builds an archive with everything that an installation needs.

use crate::support::{
    self,
    environment::{LAUNCH_EXECUTABLE, create_test_directory, isolated_command},
};
use serde_json::Value;
use std::{collections::BTreeSet, env, fs, os::unix::fs::PermissionsExt, path::Path};

/// Files that the archive must contain, relative to the installation prefix.
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
    "share/doc/launch/sbom.cdx.json",
];

/// Runs a shell script in `directory` and returns its stdout. Panics if the script fails.
fn run_shell(directory: &Path, script: &str) -> String {
    let mut command = isolated_command("bash", directory);
    // cargo finds its toolchain and the sources of crates in the home directory of the user.
    for (name, default) in [("CARGO_HOME", ".cargo"), ("RUSTUP_HOME", ".rustup")] {
        let in_home = || env::home_dir().expect("a home directory").join(default).into_os_string();
        command.env(name, env::var_os(name).unwrap_or_else(in_home));
    }
    let output = command.args(["-euc", script]).output().expect("bash runs");
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
    let digest = run_shell(&prefix, "sha256sum bin/launch | cut -d' ' -f1");
    check_bill_of_materials(&prefix, digest.trim());
    let version = run_shell(&prefix, "bin/launch --version");
    assert_eq!(version.trim(), concat!("launch ", env!("CARGO_PKG_VERSION")));
    run_shell(&prefix, ". share/bash-completion/completions/launch; complete -p launch");
    let documents = prefix.join("share/doc/launch");
    let readme = fs::read_to_string(documents.join("README.md")).expect("README.md");
    let links = readme.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
    let dead: Vec<_> = links.filter(|link| !link.contains("://") && !documents.join(link).exists()).collect();
    assert!(dead.is_empty(), "README.md links to files that are not in the package: {dead:?}");
}

/// Checks the bill of materials of a package: its form, that it names the packed file, and that
/// each dependency is a component with a license and a checksum.
fn check_bill_of_materials(prefix: &Path, executable_digest: &str) {
    let text = fs::read_to_string(prefix.join("share/doc/launch/sbom.cdx.json")).expect("a bill");
    let bill: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!((&bill["bomFormat"], &bill["specVersion"]), (&"CycloneDX".into(), &"1.5".into()));
    let product = &bill["metadata"]["component"];
    assert_eq!((&product["name"], &product["type"]), (&"launch".into(), &"application".into()));
    assert_eq!(product["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(product["hashes"][0]["content"], executable_digest);
    let text_of = |value: &Value| value.as_str().expect("text").to_owned();
    let components = bill["components"].as_array().expect("components");
    let mut references: BTreeSet<String> = components.iter().map(|c| text_of(&c["bom-ref"])).collect();
    assert_eq!(references.len(), components.len(), "each component is listed once");
    for component in components {
        assert!(component["licenses"][0]["expression"].is_string(), "{component}");
        let is_in_registry = component["purl"].is_string();
        let digest = component["hashes"][0]["content"].as_str();
        assert_eq!(digest.is_some_and(|d| d.len() == 64), is_in_registry, "{component}");
    }
    let names: BTreeSet<&str> = components.iter().filter_map(|c| c["name"].as_str()).collect();
    for name in ["ckpt", "tokio", "tokenizers", "openssl-src", "snow"] {
        assert!(names.contains(name), "{name} is missing: {names:?}");
    }
    for name in ["insta", "proptest", "libfuzzer-sys"] {
        assert!(!names.contains(name), "{name} is only part of tests");
    }
    references.insert(text_of(&product["bom-ref"]));
    for dependency in bill["dependencies"].as_array().expect("dependencies") {
        let targets = dependency["dependsOn"].as_array().expect("a list").iter();
        for reference in targets.chain([&dependency["ref"]]) {
            assert!(references.contains(&text_of(reference)), "{reference} is no component");
        }
    }
}
