//! Reads the repository that is checked: its crates, sources and documents.
use super::{crate_modules::read_crate, module_graph::ModuleGraph};
use serde_json::Value;
use std::{collections::BTreeMap, fs, path::Path, process::Command, sync::LazyLock, thread};

/// The directories with the product's sources.
pub(crate) const PRODUCT_DIRECTORIES: &[&str] = &["diagnostic/", "launcher/", "worker/"];

/// The suffix of the names of Rust files that contain only tests.
pub(crate) const TEST_FILE_SUFFIX: &str = "_tests.rs";

/// Returns the crates of the workspace, as `cargo metadata` describes them. Panics if the command
/// fails.
pub(crate) fn list_packages() -> Vec<Value> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--offline", "--no-deps", "--format-version", "1"])
        .current_dir(repository_root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let mut metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    serde_json::from_value(metadata["packages"].take()).expect("packages")
}

/// Returns the field `name` of a JSON object, which must be a string. Panics if there is none.
pub(crate) fn read_field<'v>(value: &'v Value, name: &str) -> &'v str {
    value[name].as_str().unwrap_or_else(|| panic!("{value} has no field `{name}`"))
}

/// Maps the name of each crate with a library to the module graph of the crate.
pub(crate) static MODULE_GRAPHS: LazyLock<BTreeMap<String, ModuleGraph>> = LazyLock::new(|| {
    let roots = list_packages().into_iter().filter_map(|package| {
        let targets = package["targets"].as_array().expect("targets");
        let is_library =
            |target: &&Value| target["kind"].as_array().is_some_and(|k| k.contains(&"lib".into()));
        let root = path_from_root(Path::new(read_field(targets.iter().find(is_library)?, "src_path")));
        Some((read_field(&package, "name").to_owned(), root))
    });
    let build_graph = |root: String| {
        let read_file = |path: &Path| fs::read_to_string(repository_root().join(path)).ok();
        ModuleGraph::new(read_crate(Path::new(&root), &read_file).unwrap_or_else(|e| panic!("{e}")))
    };
    let threads: Vec<_> =
        roots.map(|(name, root)| (name, thread::spawn(move || build_graph(root)))).collect();
    let join = |(name, thread): (String, thread::JoinHandle<_>)| {
        (name, thread.join().expect("the sources are read"))
    };
    threads.into_iter().map(join).collect()
});

/// Reads every source of the product, except tests, examples and benchmarks. Returns the path from
/// the repository root and the code of each.
pub(crate) fn read_product_sources() -> Vec<(String, Vec<(usize, String)>)> {
    let mut paths = Vec::new();
    PRODUCT_DIRECTORIES.iter().for_each(|top| collect_paths(top, &mut paths));
    paths.sort();
    let excluded = ["/tests/", "/examples/", "/benches/", "/tests.rs"];
    let is_source = |path: &String| {
        path.ends_with(".rs")
            && !path.ends_with(TEST_FILE_SUFFIX)
            && !excluded.iter().any(|part| path.contains(part))
    };
    let sources: Vec<_> = paths
        .into_iter()
        .filter(is_source)
        .map(|path| {
            let code = extract_code(&read_text(&repository_root().join(&path)));
            (path, code)
        })
        .collect();
    assert!(sources.len() > 20, "only {} sources found: is this the repository?", sources.len());
    sources
}

/// Returns the numbered lines of a source without comments and without `#[cfg(test)]` items.
pub(crate) fn extract_code(text: &str) -> Vec<(usize, String)> {
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

/// Returns the root directory of the repository.
pub(crate) fn repository_root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the directory of this crate is below the root")
}

/// Returns the text of docs/ARCHITECTURE.md.
pub(crate) fn read_architecture_document() -> String {
    read_text(&repository_root().join("docs/ARCHITECTURE.md"))
}

/// Returns whether `path`, relative to the repository root, exists: as a directory if `path` ends
/// with `/`, and otherwise as a file.
pub(crate) fn is_file_or_directory(path: &str) -> bool {
    let full_path = repository_root().join(path);
    if path.ends_with('/') { full_path.is_dir() } else { full_path.is_file() }
}

/// Returns a path relative to the repository root, as text.
pub(crate) fn path_from_root(path: &Path) -> String {
    path.strip_prefix(repository_root()).expect("below the root").to_string_lossy().into_owned()
}

/// Reads a text file. Panics with the path if the file cannot be read.
pub(crate) fn read_text(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Adds the paths from the repository root of everything below a directory to `paths`. The paths of
/// directories end with `/`.
pub(crate) fn collect_paths(directory: &str, paths: &mut Vec<String>) {
    for entry in fs::read_dir(repository_root().join(directory)).expect("the directory exists") {
        let entry = entry.expect("directory can be read");
        let path = format!("{directory}{}", entry.file_name().to_string_lossy());
        if entry.path().is_dir() {
            paths.push(format!("{path}/"));
            collect_paths(&format!("{path}/"), paths);
        } else {
            paths.push(path);
        }
    }
}
