//! Checks the rules of docs/ARCHITECTURE.md on the sources: the allowed dependencies between
//! crates, and the names that only some modules may use.
//!
//! A commit that changes a rule also changes the rule here, with the reason.
use serde_json::Value;
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

// --- crates --------------------------------------------------------------------------------------

/// The crates of the workspace, each with the workspace crates that it may depend on.
const ALLOWED_DEPENDENCIES: &[(&str, &[&str])] = &[
    ("ckpt", &["diagnostic"]),
    ("comm", &["device", "diagnostic"]),
    ("contract", &["diagnostic"]),
    ("device", &["diagnostic"]),
    ("diagnostic", &[]),
    ("launch", &["launcher", "worker"]),
    ("launcher", &["ckpt", "contract", "diagnostic"]),
    ("worker", &["ckpt", "comm", "contract", "device", "diagnostic"]),
];

/// Dependencies (from, to) that are allowed only as dev-dependencies.
const ALLOWED_TEST_DEPENDENCIES: &[(&str, &str)] = &[
    ("launch", "contract"),   // end-to-end tests read events
    ("launch", "diagnostic"), // and compare codes
];

#[test]
fn crates_depend_only_along_the_drawn_arrows() {
    let metadata = read_cargo_metadata();
    let packages = metadata["packages"].as_array().expect("packages");
    let ours: BTreeSet<&str> = packages.iter().map(|p| p["name"].as_str().expect("name")).collect();
    assert_eq!(
        ours,
        ALLOWED_DEPENDENCIES.iter().map(|(name, _)| *name).collect(),
        "the workspace's crates and CRATES differ"
    );

    let mut wrong = Vec::new();
    for package in packages {
        let name = package["name"].as_str().expect("name");
        let allowed =
            ALLOWED_DEPENDENCIES.iter().find(|(n, _)| *n == name).map_or(&[][..], |(_, allowed)| allowed);
        for dependency in package["dependencies"].as_array().expect("dependencies") {
            let to = dependency["name"].as_str().expect("name");
            let test_only = dependency["kind"] == "dev";
            if ours.contains(to)
                && !allowed.contains(&to)
                && !(test_only && ALLOWED_TEST_DEPENDENCIES.contains(&(name, to)))
            {
                wrong.push(format!("{name} -> {to}{}", if test_only { " (dev)" } else { "" }));
            }
        }
    }
    assert!(wrong.is_empty(), "edges that docs/ARCHITECTURE.md does not draw: {wrong:?}");
}

/// Checks that no crate declares the version of a third-party crate. Versions are declared only in
/// the workspace's manifest.
#[test]
fn only_the_workspace_manifest_declares_dependency_versions() {
    let mut declared = Vec::new();
    for manifest in [
        "diagnostic",
        "launcher",
        "launcher/contract",
        "worker",
        "worker/ckpt",
        "worker/comm",
        "worker/device",
    ] {
        let text = read_text(&repository_root().join(manifest).join("Cargo.toml"));
        let mut in_dependencies = false;
        for line in text.lines().map(str::trim) {
            if line.starts_with('[') {
                in_dependencies = line.contains("dependencies");
            } else if in_dependencies
                && line.contains('=')
                && !line.starts_with('#')
                && !line.contains("workspace")
            {
                declared.push(format!("{manifest}/Cargo.toml: {line}"));
            }
        }
    }
    assert!(declared.is_empty(), "versions belong in [workspace.dependencies] of the root: {declared:#?}");
}

/// Runs `cargo metadata` for the workspace's crates and returns the JSON. Panics if the command
/// fails.
fn read_cargo_metadata() -> Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--offline", "--no-deps", "--format-version", "1"])
        .current_dir(repository_root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

// --- what only one module may do -----------------------------------------------------------------

/// A rule that the code in `searched_paths` contains no name of `names`, except in `allowed_paths`.
/// The rule does not apply to tests and comments.
struct NameRestriction {
    description: &'static str,
    searched_paths: &'static [&'static str],
    names: &'static [&'static str],
    /// Files, or directories that end with `/`.
    allowed_paths: &'static [&'static str],
}

/// The directories with the product's sources.
const PRODUCT_DIRECTORIES: &[&str] = &["diagnostic/", "launcher/", "worker/"];

/// The rules of docs/ARCHITECTURE.md about names that only some modules may use.
const NAME_RESTRICTIONS: &[NameRestriction] = &[
    NameRestriction {
        description: "the launcher holds no tensor values: only `launch ckpt` knows checkpoints",
        searched_paths: &["launcher/"],
        names: &["ckpt::"],
        allowed_paths: &["launcher/src/cmd/ckpt.rs", "launcher/src/cmd/ckpt/"],
    },
    NameRestriction {
        description: "only report/ writes to the terminal",
        searched_paths: PRODUCT_DIRECTORIES,
        names: &["println!", "print!", "eprintln!", "eprint!", "stdout()", "stderr()", "dbg!"],
        allowed_paths: &["launcher/src/report/", "launcher/src/report.rs"],
    },
    NameRestriction {
        description: "a checkpoint is complete or absent: only commit.rs renames",
        searched_paths: PRODUCT_DIRECTORIES,
        names: &["rename(", "renameat(", "renameat2(", ".persist("],
        allowed_paths: &["worker/ckpt/src/commit.rs"],
    },
    NameRestriction {
        description: "only agent/process.rs and transport/ start processes",
        searched_paths: PRODUCT_DIRECTORIES,
        names: &["Command::new", "process::Command", "fork(", "vfork(", "posix_spawn", "execve", "execv("],
        allowed_paths: &["launcher/src/agent/process.rs", "launcher/src/transport/"],
    },
    NameRestriction {
        description: "a model does not know sharding, communication or training",
        searched_paths: &["worker/src/model/", "worker/src/model.rs"],
        names: &["comm::", "zero::", "train::", "session::", "contract::control"],
        allowed_paths: &[],
    },
    NameRestriction {
        description: "sharding does not know model families",
        searched_paths: &["worker/src/zero/"],
        names: &["model::", "llama", "Llama"],
        allowed_paths: &[],
    },
    NameRestriction {
        description: "plans, cores, the restart policy, the rendezvous protocol, partitions and data order are pure",
        searched_paths: &[
            "launcher/src/plan/",
            "launcher/src/plan.rs",
            "launcher/src/controller/core.rs",
            "launcher/src/controller/core/",
            "launcher/src/controller/policy.rs",
            "launcher/src/controller/store/core.rs",
            "launcher/src/controller/store/wire.rs",
            "launcher/src/agent/core.rs",
            "launcher/src/agent/core/",
            "worker/src/zero/partition.rs",
            "worker/src/data/epoch_permutation.rs",
            "worker/src/zero/micro_batch_sums.rs",
            "worker/src/zero/gather_retention.rs",
            "worker/ckpt/src/element_ranges.rs",
        ],
        names: &[
            "std::fs",
            "fs::",
            "File::",
            "std::env",
            "env::var",
            "Instant::now",
            "SystemTime",
            "std::net",
            "std::process",
            "thread::",
            "tokio::",
            "nix::",
            "libc::",
        ],
        allowed_paths: &[],
    },
    NameRestriction {
        description: "names of environment variables come from contract/env.rs",
        searched_paths: PRODUCT_DIRECTORIES,
        names: &["env::var(\"", "env::var_os(\"", "set_var(", "remove_var("],
        allowed_paths: &["launcher/contract/src/env.rs"],
    },
    NameRestriction {
        description: "every queue has a limit",
        searched_paths: PRODUCT_DIRECTORIES,
        names: &["mpsc::channel()", "mpsc::channel::<", "unbounded_channel", "crossbeam_channel::unbounded"],
        allowed_paths: &[],
    },
    NameRestriction {
        description: "the launcher and the worker do not know each other",
        searched_paths: &["launcher/src/", "launcher/contract/"],
        names: &["worker::", "comm::", "device::"],
        allowed_paths: &[],
    },
    NameRestriction {
        description: "the launcher and the worker do not know each other",
        searched_paths: &["worker/"],
        names: &["launcher::"],
        allowed_paths: &[],
    },
];

/// The exceptions to [`NAME_RESTRICTIONS`] as file, name and reason. An exception that no code
/// needs fails the test.
const RESTRICTION_EXCEPTIONS: &[(&str, &str, &str)] = &[
    ("launcher/src/agent/driver.rs", "stdout()", "its stdout is the control stream to the controller"),
    (
        "launcher/src/agent/driver.rs",
        "stderr()",
        "the controller cannot be informed when the stream to it failed",
    ),
    ("launcher/src/agent/executable.rs", "stdout()", "the script that copies it to a host reads the hash"),
    ("launcher/src/agent/executable.rs", "stderr()", "that script passes the error on"),
    (
        "launcher/src/controller/journal.rs",
        "rename(",
        "the run directory's record of the job, replaced atomically",
    ),
    ("worker/src/runtime.rs", "println!", "a worker's stdout is its log file"),
    ("worker/src/network.rs", "println!", "a worker's stdout is its log file"),
    ("worker/src/runtime.rs", "eprint!", "a worker's stderr is its log file"),
    (
        "worker/src/gpu_check.rs",
        "println!",
        "`launch gpu-check` is a separate program that runs before any job",
    ),
    ("worker/src/gpu_check.rs", "print!", "its errors"),
    ("worker/src/gpu_check/curves.rs", "println!", "part of `launch gpu-check`"),
    ("worker/src/gpu_check/throughput.rs", "println!", "part of `launch gpu-check`"),
    ("worker/src/gpu.rs", "println!", "a worker's stdout is its log file"),
    (
        "worker/device/src/cuda/disk_cache.rs",
        "rename(",
        "the kernel cache is not a checkpoint: it can be rebuilt",
    ),
    (
        "worker/src/data/token_cache_builder.rs",
        "rename(",
        "the token cache is not a checkpoint: it can be rebuilt",
    ),
    (
        "worker/src/data/content_digests.rs",
        "rename(",
        "the token cache is not a checkpoint: it can be rebuilt",
    ),
];

#[test]
fn restricted_names_occur_only_in_their_modules() {
    let sources = read_product_sources();
    let mut wrong = Vec::new();
    let mut used = BTreeSet::new();
    for rule in NAME_RESTRICTIONS {
        for (path, code) in sources.iter().filter(|(path, _)| is_in_any(path, rule.searched_paths)) {
            if is_in_any(path, rule.allowed_paths) {
                continue;
            }
            for (line, name) in find_violations(code, rule.names) {
                match RESTRICTION_EXCEPTIONS.iter().position(|(file, n, _)| file == path && *n == name) {
                    Some(at) => {
                        used.insert(at);
                    }
                    None => wrong.push(format!("{path}:{line}: `{name}` — {}", rule.description)),
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} places violate a rule:\n{}", wrong.len(), wrong.join("\n"));
    let stale: Vec<_> = (0..RESTRICTION_EXCEPTIONS.len())
        .filter(|i| !used.contains(i))
        .map(|i| RESTRICTION_EXCEPTIONS[i])
        .collect();
    assert!(stale.is_empty(), "exceptions that nothing needs any more: {stale:?}");
}

#[test]
fn the_paths_of_rules_exist() {
    let places = NAME_RESTRICTIONS
        .iter()
        .flat_map(|rule| rule.searched_paths.iter().chain(rule.allowed_paths).copied());
    let absent: Vec<_> = places.filter(|place| !repository_root().join(place).exists()).collect();
    assert!(absent.is_empty(), "rules name paths that do not exist: {absent:?}");
}

/// Checks that [`find_violations`] finds names in code, and ignores names in comments and tests and
/// longer names with the same ending.
#[test]
fn the_checker_sees_code_and_only_code() {
    let text = "use a::fs;\n// fs::rename in a comment\nfn f() { fs::rename(x, y); } // fs::rename\n\
                fn g() { prefs::read(); eprintln!(\"// not a comment\"); fs::read(z) }\n\
                #[cfg(test)]\nmod tests {\n    fn t() { fs::rename(x, y); }\n}\nfn after() { fs::rename(p, q) }\n";
    let code = extract_code(text);
    assert_eq!(find_violations(&code, &["fs::rename"]), [(3, "fs::rename"), (9, "fs::rename")]);
    assert_eq!(find_violations(&code, &["fs::read"]), [(4, "fs::read")]);
    assert_eq!(find_violations(&code, &["println!"]), []);
    assert_eq!(find_violations(&code, &["eprintln!"]), [(4, "eprintln!")]);
    let paths = extract_code("use crate::cmd::ckpt::run;\nlet x = ckpt::open(p);\n");
    assert_eq!(find_violations(&paths, &["ckpt::"]), [(2, "ckpt::")]);
}

/// Returns the line number and the name of each restricted name in the code. A name that starts
/// with a letter must start a word, and a crate or module (`name::`) must start a path.
fn find_violations(code: &[(usize, String)], names: &[&'static str]) -> Vec<(usize, &'static str)> {
    let mut found = Vec::new();
    for (number, line) in code {
        for name in names {
            let whole = |at: usize| match line[..at].chars().next_back() {
                Some(':') => !name.ends_with("::"),
                Some(before) => {
                    !name.starts_with(char::is_alphanumeric) || !(before.is_alphanumeric() || before == '_')
                }
                None => true,
            };
            if line.match_indices(name).any(|(at, _)| whole(at)) {
                found.push((*number, *name));
            }
        }
    }
    found
}

/// Returns the numbered lines of a source without comments and without `#[cfg(test)]` items.
fn extract_code(text: &str) -> Vec<(usize, String)> {
    let mut code = Vec::new();
    let mut lines = text.lines().enumerate();
    while let Some((at, line)) = lines.next() {
        if line.trim_start().starts_with("#[cfg(test)]") {
            // rustfmt closes an item at the indentation it opened with
            let indent = line.len() - line.trim_start().len();
            for (_, inner) in lines.by_ref() {
                let closes = inner.len() - inner.trim_start().len() == indent
                    && (inner.trim_start().starts_with('}') || inner.ends_with(';'));
                if closes {
                    break;
                }
            }
            continue;
        }
        code.push((at + 1, strip_comment(line).to_owned()));
    }
    code
}

/// Returns the part of a line before its `//` comment. A `//` after an odd number of quotes is part
/// of a string.
fn strip_comment(line: &str) -> &str {
    for (at, _) in line.match_indices("//") {
        if line[..at].matches('"').count().is_multiple_of(2) {
            return &line[..at];
        }
    }
    line
}

/// Returns whether `path` is one of the files, or in one of the directories (`dir/`), in `places`.
fn is_in_any(path: &str, places: &[&str]) -> bool {
    places.iter().any(|place| if place.ends_with('/') { path.starts_with(place) } else { path == *place })
}

/// Reads every source of the product, except tests, examples and benchmarks. Returns the path from
/// the repository root and the code of each.
fn read_product_sources() -> Vec<(String, Vec<(usize, String)>)> {
    let mut files = Vec::new();
    for top in PRODUCT_DIRECTORIES {
        collect_rust_files(&repository_root().join(top), &mut files);
    }
    files.sort();
    assert!(files.len() > 20, "only {} sources found: is this the repository?", files.len());
    files
        .iter()
        .map(|file| (path_from_root(file), extract_code(&read_text(file))))
        .filter(|(path, _)| {
            let outside = ["/tests/", "/examples/", "/benches/", "/tests.rs"];
            !outside.iter().any(|part| path.contains(part))
        })
        .collect()
}

// --- the map -------------------------------------------------------------------------------------

#[test]
fn the_architecture_document_names_every_directory() {
    let map = read_text(&repository_root().join("docs/ARCHITECTURE.md"));
    let mut directories = BTreeSet::new();
    for (path, _) in read_product_sources() {
        let directory = Path::new(&path).parent().expect("a file has a directory");
        if directory.file_name().is_some_and(|name| name != "src") {
            directories.insert(directory.file_name().expect("checked").to_string_lossy().into_owned());
        }
    }
    let missing: Vec<_> = directories.iter().filter(|name| !map.contains(&format!("{name}/"))).collect();
    assert!(missing.is_empty(), "docs/ARCHITECTURE.md does not mention {missing:?} (as `name/`)");
}

#[test]
fn paths_in_the_docs_exist() {
    let mut dead = Vec::new();
    let mut documents = vec![repository_root().join("README.md")];
    for entry in fs::read_dir(repository_root().join("docs")).expect("docs/") {
        documents.push(entry.expect("docs/ can be read").path());
    }
    for document in documents.iter().filter(|d| d.extension().is_some_and(|e| e == "md")) {
        let directory = document.parent().expect("a file has a directory");
        for (number, line) in read_text(document).lines().enumerate() {
            let dead_here = find_dead_paths(line, directory).into_iter();
            dead.extend(dead_here.map(|path| format!("{}:{}: {path}", path_from_root(document), number + 1)));
        }
    }
    assert!(dead.is_empty(), "paths that don't exist:\n{}", dead.join("\n"));
}

/// Returns the paths in a line of Markdown that do not exist: relative links, and words in
/// backticks that start with a directory of the repository.
fn find_dead_paths(line: &str, directory: &Path) -> Vec<String> {
    let mut dead = Vec::new();
    for link in line.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
        let path = link.split('#').next().unwrap_or("");
        if !path.is_empty() && !link.contains("://") && !directory.join(path).exists() {
            dead.push(link.to_owned());
        }
    }
    // every second part of a line that is split at backticks is code
    for word in line.split('`').skip(1).step_by(2).flat_map(str::split_whitespace) {
        let prefixes = ["diagnostic/", "launcher/", "worker/", "docs/", "scripts/", "tests/", "configs/"];
        let plain = word.chars().all(|c| c.is_alphanumeric() || "/._-".contains(c));
        if plain
            && prefixes.iter().any(|prefix| word.starts_with(prefix))
            && !repository_root().join(word).exists()
        {
            dead.push(word.to_owned());
        }
    }
    dead
}

#[test]
fn dead_paths_are_found() {
    let line = "see `docs/none.md`, `docs/testing.md`, [a](docs/none.md#b), [b](docs/testing.md#skips), [c](https://x.y/docs/z)";
    assert_eq!(find_dead_paths(line, repository_root()), ["docs/none.md#b", "docs/none.md"]);
}

// --- files ---------------------------------------------------------------------------------------

/// Returns the root directory of the repository.
fn repository_root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns a path relative to the repository root, as text.
fn path_from_root(path: &Path) -> String {
    path.strip_prefix(repository_root()).expect("below the root").to_string_lossy().into_owned()
}

/// Reads a text file. Panics with the path if the file cannot be read.
fn read_text(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Adds the paths of all Rust files below a directory to `files`.
fn collect_rust_files(directory: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap_or_else(|e| panic!("{}: {e}", directory.display())) {
        let path = entry.expect("directory can be read").path();
        if path.is_dir() {
            collect_rust_files(&path, files);
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
}
