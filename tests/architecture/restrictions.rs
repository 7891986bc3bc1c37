//! The rules about names and items that only some modules may use, and their checks.
use super::repository::{
    MODULE_GRAPHS, PRODUCT_DIRECTORIES, TEST_FILE_SUFFIX, extract_code, is_file_or_directory,
    read_product_sources,
};
use std::collections::BTreeSet;

/// A rule that the code in `searched_paths` contains no name of `names`, except in `allowed_paths`.
/// The rule does not apply to tests and comments.
struct NameRestriction {
    description: &'static str,
    searched_paths: &'static [&'static str],
    names: &'static [&'static str],
    /// Paths of the files and directories (`dir/`) in which the names are allowed.
    allowed_paths: &'static [&'static str],
}

/// The rules of docs/ARCHITECTURE.md about names that only some modules may use.
const NAME_RESTRICTIONS: &[NameRestriction] = &[
    NameRestriction {
        description: "the launcher holds no tensor values: only `launch ckpt` knows checkpoints",
        searched_paths: &["launcher/"],
        names: &["ckpt::"],
        // cmd.rs names its own module `ckpt`
        // dumps of torch's flight recorder are pickles
        allowed_paths: &[
            "launcher/src/cmd.rs",
            "launcher/src/cmd/ckpt.rs",
            "launcher/src/cmd/ckpt/",
            "launcher/src/agent/hang/flight_recorder.rs",
        ],
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
        // the cache of executables contains no checkpoints
        allowed_paths: &["worker/ckpt/src/save/commit.rs", "launcher/src/agent/executable_cache.rs"],
    },
    NameRestriction {
        description: "only agent/process.rs, cluster/, detached_controller.rs, supervised_controller.rs, \
                      mig_uuids.rs, sandbox/ and part_process.rs start processes; \
                      original_program.rs replaces its own, and core_dumps.rs sets a limit of new ones",
        searched_paths: PRODUCT_DIRECTORIES,
        names: &["Command::new", "process::Command", "fork(", "vfork(", "posix_spawn", "execve", "execv("],
        allowed_paths: &[
            "launcher/src/agent/process.rs",
            "launcher/src/agent/process/",
            "launcher/src/cluster/",
            "launcher/src/detached_controller.rs",
            "launcher/src/supervised_controller.rs",
            "launcher/src/discover/accelerators/mig_uuids.rs",
            "launcher/src/cmd/drop_in/original_program.rs",
            "launcher/src/core_dumps.rs",
            "worker/sandbox/src/sandbox_process.rs",
            "worker/src/gpu_check/part_process.rs",
        ],
    },
    NameRestriction {
        description: "only the provider knows its scheduler",
        searched_paths: &["launcher/src/"],
        names: &["slurm", "Slurm", "SLURM", "srun"],
        allowed_paths: &[
            "launcher/src/cluster.rs",
            "launcher/src/cluster/slurm.rs",
            "launcher/src/cluster/slurm/",
            "launcher/src/import.rs",
            "launcher/src/import/",
            "launcher/src/testing.rs",
        ],
    },
    NameRestriction {
        description: "a model does not know sharding, communication or training",
        searched_paths: &["worker/src/model/", "worker/src/model.rs"],
        names: &["comm::", "zero::", "train::", "session::", "protocol::control"],
        allowed_paths: &[],
    },
    NameRestriction {
        description: "sharding does not know model families",
        searched_paths: &["worker/src/zero/"],
        names: &["model::", "llama", "Llama"],
        allowed_paths: &[],
    },
    NameRestriction {
        description: "names of environment variables come from jobspec/env.rs",
        searched_paths: PRODUCT_DIRECTORIES,
        names: &["env::var(\"", "env::var_os(\"", "set_var(", "remove_var("],
        allowed_paths: &["launcher/jobspec/src/env.rs"],
    },
    NameRestriction {
        description: "libraries that interpret untrusted files run in the sandbox process",
        searched_paths: PRODUCT_DIRECTORIES,
        names: &["tokenizers::", "minijinja::", "parquet::"],
        allowed_paths: &["worker/src/data/interpreter/"],
    },
    NameRestriction {
        description: "the launcher and the worker do not know each other",
        searched_paths: &["launcher/src/", "launcher/protocol/", "launcher/jobspec/"],
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
    ("launcher/src/agent/startup.rs", "stdout()", "its stdout is the control stream to the controller"),
    ("launcher/src/agent/startup.rs", "stderr()", "there is no control stream to the controller yet"),
    (
        "launcher/src/agent/driver.rs",
        "stderr()",
        "the controller cannot be informed when the stream to it failed",
    ),
    ("launcher/src/cmd/manifest.rs", "Slurm", "the name of a subcommand"),
    ("launcher/src/executable.rs", "stdout()", "the script that copies it to a host reads the hash"),
    ("launcher/src/executable.rs", "stderr()", "that script passes the error on"),
    ("worker/src/data/chat_record.rs", "minijinja::", "the type of a JSON value; nothing is interpreted"),
    ("worker/src/data/json_lines.rs", "minijinja::", "the type of a JSON value; nothing is interpreted"),
    (
        "launcher/src/agent/driver/controller_messages.rs",
        "stderr()",
        "the controller cannot be informed when the stream to it failed",
    ),
    ("launcher/src/controller/journal/takeover.rs", "rename(", "the journal, replaced atomically"),
    ("launcher/src/runs/atomic_file.rs", "rename(", "the records in the run directory, replaced atomically"),
    ("worker/src/runtime.rs", "println!", "a worker's stdout is its log file"),
    ("worker/src/runtime/network.rs", "println!", "a worker's stdout is its log file"),
    ("worker/src/runtime.rs", "eprint!", "a worker's stderr is its log file"),
    ("worker/src/gpu_check.rs", "println!", "the results of `launch gpu-check`"),
    ("worker/src/gpu_check/table.rs", "println!", "the results of `launch gpu-check`"),
    ("worker/src/gpu_check/message.rs", "println!", "stdout of a part is the stream to `launch gpu-check`"),
    (
        "worker/src/gpu_check/report_file.rs",
        "rename(",
        "the results of `launch gpu-check`, replaced atomically",
    ),
    ("worker/src/runtime/rank_device.rs", "println!", "a worker's stdout is its log file"),
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

/// A rule that the code in `searched_paths` uses no item of another crate in `items`, except in
/// `allowed_paths`. An item stands for everything that its path starts.
struct ExternalItemRestriction {
    description: &'static str,
    searched_paths: &'static [&'static str],
    items: &'static [&'static str],
    /// Paths of the files and directories (`dir/`) in which the items are allowed.
    allowed_paths: &'static [&'static str],
}

/// The rules of docs/ARCHITECTURE.md about items of other crates. They also hold for imports under
/// another name and for re-exports.
const EXTERNAL_ITEM_RESTRICTIONS: &[ExternalItemRestriction] = &[
    ExternalItemRestriction {
        description: "plans, cores, the restart policy, the rendezvous protocol, partitions and data order are pure",
        searched_paths: &[
            "launcher/src/plan/",
            "launcher/src/plan.rs",
            "launcher/src/controller/core.rs",
            "launcher/src/controller/core/",
            "launcher/src/controller/restart_policy.rs",
            "launcher/src/rendezvous/store/core.rs",
            "launcher/src/rendezvous/store/wire.rs",
            "launcher/src/agent/core.rs",
            "launcher/src/agent/core/",
            "worker/src/zero/partition.rs",
            "worker/src/data/epoch_permutation.rs",
            "worker/src/zero/micro_batch_sums.rs",
            "worker/src/zero/gather_retention.rs",
            "worker/ckpt/src/tensor/element_ranges.rs",
        ],
        items: &[
            "std::fs",
            "std::env",
            "std::io::stdin",
            "std::io::stdout",
            "std::io::stderr",
            "std::net::TcpListener",
            "std::net::TcpStream",
            "std::net::ToSocketAddrs",
            "std::net::UdpSocket",
            "std::os",
            "std::process",
            "std::thread",
            "std::time::Instant::now",
            "std::time::SystemTime",
            "tokio",
            "nix",
            "libc",
        ],
        allowed_paths: &[],
    },
    ExternalItemRestriction {
        description: "every queue has a limit",
        searched_paths: PRODUCT_DIRECTORIES,
        items: &[
            "std::sync::mpsc::channel",
            "tokio::sync::mpsc::unbounded_channel",
            "async_channel::unbounded",
            "crossbeam::channel::unbounded",
            "crossbeam_channel::unbounded",
            "flume::unbounded",
        ],
        allowed_paths: &[],
    },
];

#[test]
fn restricted_items_of_other_crates_occur_only_in_their_modules() {
    let mut wrong = Vec::new();
    for rule in EXTERNAL_ITEM_RESTRICTIONS {
        for used in MODULE_GRAPHS.values().flat_map(|graph| &graph.external_uses) {
            let is_checked =
                is_in_any(&used.file, rule.searched_paths) && !is_in_any(&used.file, rule.allowed_paths);
            if is_checked && rule.items.iter().any(|item| starts_with_path(&used.item, item)) {
                wrong.push(format!("{}:{}: `{}` — {}", used.file, used.line, used.item, rule.description));
            }
        }
    }
    assert!(wrong.is_empty(), "{} places violate a rule:\n{}", wrong.len(), wrong.join("\n"));
}

/// Returns whether `path` is `start` or an item below it.
fn starts_with_path(path: &str, start: &str) -> bool {
    path.strip_prefix(start).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

#[test]
fn the_paths_of_rules_exist() {
    let names = NAME_RESTRICTIONS.iter().flat_map(|rule| [rule.searched_paths, rule.allowed_paths]);
    let items = EXTERNAL_ITEM_RESTRICTIONS.iter().flat_map(|rule| [rule.searched_paths, rule.allowed_paths]);
    let exceptions = RESTRICTION_EXCEPTIONS.iter().map(|(path, _, _)| *path);
    let paths = names.chain(items).flatten().copied().chain(exceptions);
    let absent: BTreeSet<_> = paths.filter(|path| !is_file_or_directory(path)).collect();
    assert!(absent.is_empty(), "rules name paths that do not exist: {absent:?}");
}

/// Checks that only test code declares modules whose file names end with [`TEST_FILE_SUFFIX`],
/// because the rules skip these files.
#[test]
fn files_of_tests_are_modules_of_tests() {
    let mut wrong = Vec::new();
    for (path, code) in read_product_sources() {
        for (line, text) in code {
            let module = text.trim().strip_suffix(';').and_then(|text| text.rsplit_once("mod "));
            let is_test_module =
                module.is_some_and(|(_, name)| format!("{name}.rs").ends_with(TEST_FILE_SUFFIX));
            if is_test_module || text.contains(&format!("{TEST_FILE_SUFFIX}\"]")) {
                wrong.push(format!("{path}:{line}: {text}"));
            }
        }
    }
    assert!(wrong.is_empty(), "modules of tests without #[cfg(test)]:\n{}", wrong.join("\n"));
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
pub(crate) fn find_violations(
    code: &[(usize, String)],
    names: &[&'static str],
) -> Vec<(usize, &'static str)> {
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

/// Returns whether `path` is one of the files, or in one of the directories (`dir/`), in `places`.
fn is_in_any(path: &str, places: &[&str]) -> bool {
    places.iter().any(|place| if place.ends_with('/') { path.starts_with(place) } else { path == *place })
}
