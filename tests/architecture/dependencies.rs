//! Checks sources, licenses and names of all crates in `Cargo.lock` against `deny.toml`, also where
//! cargo-deny is not installed. Only cargo-deny knows advisories.
use crate::repository::{read_field, read_text, repository_root};
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
};

/// The only source of crates that are not part of this repository.
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Returns the packages and their dependencies that the lock file names, as cargo prints them.
fn read_metadata() -> Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--offline", "--locked", "--format-version", "1"])
        .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
        .current_dir(repository_root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Returns the crates that `deny.toml` bans, each with the only crates that may depend on it.
fn read_banned_crates(deny: &str) -> BTreeMap<&str, BTreeSet<&str>> {
    let list = deny.split_once("\ndeny = [").expect("a list of banned crates").1;
    let entries = list.lines().take_while(|line| *line != "]");
    let entries = entries.filter_map(|line| line.trim().strip_prefix("{ name = \"")?.split_once('"'));
    entries.map(|(name, rest)| (name, read_wrappers(rest))).collect()
}

/// Returns the crates that an entry of the banned crates lists as `wrappers`.
fn read_wrappers(entry: &str) -> BTreeSet<&str> {
    let list = entry.split_once("wrappers = [").map_or("", |(_, list)| list);
    list.split(']').next().unwrap_or_default().split('"').skip(1).step_by(2).collect()
}

/// Returns the licenses that `deny.toml` allows.
fn read_allowed_licenses(deny: &str) -> BTreeSet<&str> {
    let list = deny.split_once("\nallow = [").expect("a list of licenses").1;
    list.split(']').next().unwrap_or_default().split('"').skip(1).step_by(2).collect()
}

/// Returns whether a license expression (SPDX) is satisfied by allowed licenses. `OR` binds weaker
/// than `AND`. An exception (`WITH`) only adds permissions.
fn is_license_allowed(expression: &str, allowed: &BTreeSet<&str>) -> bool {
    let text = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut words = text.split_whitespace().peekable();
    let is_allowed = parse_alternatives(&mut words, allowed);
    is_allowed && words.next().is_none()
}

type LicenseWords<'w> = std::iter::Peekable<std::str::SplitWhitespace<'w>>;

/// Parses terms of a license expression that `OR` separates, and returns whether at least one of
/// them is allowed.
fn parse_alternatives(words: &mut LicenseWords<'_>, allowed: &BTreeSet<&str>) -> bool {
    let mut is_allowed = parse_conjunction(words, allowed);
    while words.next_if_eq(&"OR").is_some() {
        is_allowed |= parse_conjunction(words, allowed);
    }
    is_allowed
}

/// Parses terms of a license expression that `AND` separates, and returns whether all of them are
/// allowed.
fn parse_conjunction(words: &mut LicenseWords<'_>, allowed: &BTreeSet<&str>) -> bool {
    let mut is_allowed = true;
    loop {
        is_allowed &= match words.next() {
            Some("(") => {
                let inner = parse_alternatives(words, allowed);
                words.next() == Some(")") && inner
            }
            license => license.is_some_and(|license| allowed.contains(license)),
        };
        if words.next_if_eq(&"WITH").is_some() {
            words.next();
        }
        if words.next_if_eq(&"AND").is_none() {
            return is_allowed;
        }
    }
}

#[test]
fn crates_come_from_the_registry_and_have_allowed_licenses() {
    let deny = read_text(&repository_root().join("deny.toml"));
    let allowed = read_allowed_licenses(&deny);
    assert!(allowed.contains("MIT"), "{allowed:?}");
    let metadata = read_metadata();
    let packages = metadata["packages"].as_array().expect("packages");
    assert!(packages.len() > 100, "{}", packages.len());
    let mut rejected = Vec::new();
    for package in packages.iter().filter(|package| !package["source"].is_null()) {
        let (name, source) = (read_field(package, "name"), read_field(package, "source"));
        if source != REGISTRY {
            rejected.push(format!("{name} comes from {source}"));
        }
        let license = package["license"].as_str().unwrap_or("no license");
        if !is_license_allowed(license, &allowed) {
            rejected.push(format!("{name} has the license {license}"));
        }
    }
    assert!(rejected.is_empty(), "{}", rejected.join("\n"));
}

#[test]
fn no_crate_depends_on_a_banned_one() {
    let deny = read_text(&repository_root().join("deny.toml"));
    let banned = read_banned_crates(&deny);
    assert!(banned["serde_yaml"].is_empty() && banned["openssl-sys"].contains("libssh2-sys"), "{banned:?}");
    let metadata = read_metadata();
    let packages = metadata["packages"].as_array().expect("packages").iter();
    let names: BTreeMap<&str, &str> =
        packages.map(|package| (read_field(package, "id"), read_field(package, "name"))).collect();
    let mut used = 0;
    for node in metadata["resolve"]["nodes"].as_array().expect("nodes") {
        let dependent = names[read_field(node, "id")];
        for dependency in node["dependencies"].as_array().expect("dependencies") {
            let dependency = names[dependency.as_str().expect("an ID")];
            if let Some(wrappers) = banned.get(dependency) {
                assert!(wrappers.contains(dependent), "{dependent} depends on {dependency}");
                used += 1;
            }
        }
    }
    assert!(used > 0, "libssh2-sys depends on openssl-sys");
}

#[test]
fn license_expressions_are_evaluated() {
    let allowed = BTreeSet::from(["MIT", "ISC", "Unicode-3.0"]);
    for (expression, expected) in [
        ("MIT", true),
        ("GPL-3.0", false),
        ("GPL-3.0 OR MIT", true),
        ("MIT/GPL-3.0", true),
        ("(GPL-3.0 OR MIT) AND Unicode-3.0", true),
        ("(GPL-3.0 OR MIT) AND OpenSSL", false),
        ("MIT AND ISC OR GPL-3.0", true),
        ("MIT AND GPL-3.0", false),
        ("MIT WITH LLVM-exception", true),
        ("MIT MIT", false),
        ("(MIT", false),
        ("", false),
    ] {
        assert_eq!(is_license_allowed(expression, &allowed), expected, "{expression}");
    }
}
