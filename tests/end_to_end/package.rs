//! Checks that `scripts/package` builds packages with everything that an installation needs, and
//! that equal files give equal bytes.

use crate::support::{
    self,
    environment::{LAUNCH_EXECUTABLE, create_test_directory, isolated_command},
};
use serde_json::Value;
use std::{collections::BTreeSet, env, fs, path::Path};

/// Files that the tarball must contain, relative to the installation prefix.
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
    "share/doc/launch/THIRD-PARTY-LICENSES",
];
/// The directory of the scripts that build packages.
const SCRIPTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts");

/// Packs the executable under test, without its debug information, to the directory `out` in
/// `directory`. Returns the file name of the tarball.
fn build_packages(directory: &Path, out: &str) -> String {
    let script = format!(
        "[ -e launch ] || strip -o launch '{LAUNCH_EXECUTABLE}'\n\
         export SOURCE_DATE_EPOCH=1700000000\n\
         '{SCRIPTS}/package' --executable launch --compression-level 1 '{out}'"
    );
    let path = run_shell(directory, &script);
    Path::new(path.trim()).file_name().expect("a name").to_str().expect("UTF-8").to_owned()
}

/// Runs Python code that can import the modules of the release scripts, and returns its stdout.
fn run_python(directory: &Path, code: &str) -> String {
    run_shell(
        directory,
        &format!("PYTHONDONTWRITEBYTECODE=1 PYTHONPATH='{SCRIPTS}' python3 - <<'END'\n{code}\nEND"),
    )
}

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
fn a_tarball_installs_the_executable_its_man_pages_completions_and_documents() {
    let directory = create_test_directory();
    let archive = build_packages(directory.path(), "out");
    let install = format!(
        "cd out && sha256sum --check --quiet *.sha256\n\
         mkdir ../prefix && tar -xzf '{archive}' -C ../prefix --strip-components=1"
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

#[test]
fn packages_of_equal_files_have_equal_bytes_in_any_time_zone_and_with_any_umask() {
    let directory = create_test_directory();
    build_packages(directory.path(), "first");
    run_shell(directory.path(), "cp -r first kept; touch -d 2020-01-01 launch; chmod 700 launch");
    let other = format!(
        "umask 077; export TZ=Asia/Tokyo SOURCE_DATE_EPOCH=1700000000\n\
         '{SCRIPTS}/package' --executable launch --compression-level 1 second >&2\n\
         diff -r first second; diff -r first kept; stat -c %a second/*.deb"
    );
    assert_eq!(run_shell(directory.path(), &other).trim(), "644");
}

#[test]
fn pip_installs_the_wheel_without_network_and_launch_is_on_the_path() {
    let directory = create_test_directory();
    build_packages(directory.path(), "out");
    let install = "python3 -m venv environment\n\
         environment/bin/pip --isolated --disable-pip-version-check install --quiet --no-index out/*.whl >&2\n\
         PATH=\"$PWD/environment/bin:$PATH\"; launch --version; launch schema >/dev/null\n\
         test -s environment/share/man/man1/launch-run.1\n\
         test -s environment/share/bash-completion/completions/launch\n\
         test -s environment/share/doc/launch/configs/quickstart.yaml\n\
         launch quickstart\n\
         cd quickstart\n\
         launch job.yaml --set train.steps=1 --set train.batch.global=2 --set train.batch.micro=1 >&2\n\
         test -d runs\n\
         cd ..\n\
         environment/bin/pip --isolated show launch | grep -E '^(Name|Version|Summary)'";
    let output = run_shell(directory.path(), install);
    let next = "to train: cd quickstart && launch job.yaml";
    for line in [concat!("launch ", env!("CARGO_PKG_VERSION")), "Name: launch", next] {
        assert!(output.lines().any(|found| found == line), "{line}: {output}");
    }
    let check = r#"
import base64, csv, glob, hashlib, io, zipfile
wheel = zipfile.ZipFile(glob.glob("out/*.whl")[0])
names = wheel.namelist()
info = next(name for name in names if name.endswith(".dist-info/RECORD")).removesuffix("RECORD")
rows = list(csv.reader(io.StringIO(wheel.read(info + "RECORD").decode())))
assert sorted(row[0] for row in rows) == sorted(names), "RECORD lists each file once"
for path, digest, size in rows:
    if path != info + "RECORD":
        data = wheel.read(path)
        expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert (digest, int(size)) == ("sha256=" + expected, len(data)), path
for name in ("licenses/LICENSE", "licenses/THIRD-PARTY-LICENSES", "sboms/launch.cdx.json"):
    assert wheel.read(info + name)
metadata = wheel.read(info + "METADATA").decode()
assert "License-Expression: Apache-2.0" in metadata.splitlines()
tag = wheel.filename.rsplit("-", 3)[1:]
assert f"Tag: {'-'.join(tag)[:-4]}" in wheel.read(info + "WHEEL").decode().splitlines()
assert tag[2].startswith("manylinux_2_"), tag
"#;
    run_python(directory.path(), check);
}

#[test]
fn a_debian_package_has_the_files_checksums_and_fields_that_dpkg_needs() {
    let directory = create_test_directory();
    build_packages(directory.path(), "out");
    let unpack = "mkdir deb root control; cd deb; ar x ../out/*.deb; ar t ../out/*.deb; cat debian-binary\n\
         tar -xzf data.tar.gz -C ../root; tar -xzf control.tar.gz -C ../control\n\
         cd ../root; md5sum --check --quiet ../control/md5sums >&2; cat ../control/control\n\
         test \"$(find . -type f | wc -l)\" = \"$(wc -l <../control/md5sums)\"\n\
         for file in usr/share/man/man1/launch-run.1.gz usr/share/doc/launch/changelog.Debian.gz; do gzip -t $file; done\n\
         test -s usr/share/doc/launch/copyright -a -s usr/share/zsh/vendor-completions/_launch\n\
         test -z \"$(tar --numeric-owner -tvzf ../deb/data.tar.gz | grep -v ' 0/0 ')\"\n\
         usr/bin/launch --version";
    let output = run_shell(directory.path(), unpack);
    let lines: BTreeSet<&str> = output.lines().collect();
    let (version, machine) = (env!("CARGO_PKG_VERSION"), env::consts::ARCH);
    let architecture = if machine == "x86_64" { "amd64" } else { "arm64" };
    for line in [
        "debian-binary",
        "2.0",
        "Package: launch",
        &format!("Version: {version}-1"),
        &format!("Architecture: {architecture}"),
        &format!("launch {version}"),
    ] {
        assert!(lines.contains(line), "{line}: {output}");
    }
    assert!(output.contains("\nDepends: libc6 (>= 2."), "{output}");
    let file = fs::read_to_string(directory.path().join("out/Containerfile")).expect("a container file");
    assert!(file.contains(&format!("COPY launch_{version}-1_${{TARGETARCH}}.deb")), "{file}");
}

#[test]
fn a_release_rejects_executables_that_need_a_newer_glibc_or_rare_libraries() {
    let directory = create_test_directory();
    let code = format!(
        r##"
from dataclasses import replace
from pathlib import Path
from release_tools import build, debian, elf, packages, wheel
from release_tools.error import ReleaseError

def reject(function, *arguments):
    try:
        function(*arguments)
    except ReleaseError as error:
        return str(error)
    raise SystemExit(f"{{function.__name__}} accepts {{arguments}}")

found = elf.read_requirements("{LAUNCH_EXECUTABLE}")
newest = elf.format_version(found.find_glibc())
assert f"GLIBC_{{newest}}" in reject(elf.check_portability, found, (2, 5)), newest
portable = replace(found, libraries=("libc.so.6", "libm.so.6"), versions=frozenset([("libc.so.6", "GLIBC_2.28")]))
elf.check_portability(portable, (2, 28))
for version in ("GLIBC_2.29", "GLIBC_ABI_DT_RELR", "GCC_8.0.0"):
    changed = replace(portable, versions=frozenset([("libc.so.6", version)]))
    assert version in reject(elf.check_portability, changed, (2, 28))
assert "libssl.so.3" in reject(elf.check_libraries, replace(portable, libraries=("libssl.so.3",)))
data = Path("{LAUNCH_EXECUTABLE}").read_bytes()[:1 << 20]
for wrong in (b"", b"#!/bin/sh", data[:20], data):
    Path("wrong").write_bytes(wrong)
    assert "wrong" in reject(elf.read_requirements, "wrong")
other = "aarch64" if found.machine == "x86_64" else "x86_64"
assert other in reject(build.check_executable, Path("{LAUNCH_EXECUTABLE}"), other)
assert wheel.convert_version("0.2.0-rc.1") == "0.2.0rc1" and "0.2" in reject(wheel.convert_version, "0.2")
assert debian.convert_version("0.2.0-rc.1") == "0.2.0~rc.1-1"
"##
    );
    run_python(directory.path(), &code);
}
