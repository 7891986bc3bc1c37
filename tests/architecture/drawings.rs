//! Reads the drawings in docs/ARCHITECTURE.md: the arrows between crates, the tree of directories
//! and files, and the layers of a crate's modules.
use crate::module_graph::ModuleGraph;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

/// The allowed dependencies between crates, each as the dependent crate and the crate that it may
/// depend on.
pub(crate) type CrateArrows = BTreeSet<(String, String)>;

/// The order of a crate's top-level modules. A module may use modules of lower layers only.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct CrateLayers {
    pub(crate) crate_name: String,
    /// The names of the modules of each layer, from the lowest layer up.
    pub(crate) layers: Vec<Vec<String>>,
}

/// Returns the lines of all fenced blocks in the section of a Markdown document that starts with
/// `heading`. Returns nothing if the document has no such section.
pub(crate) fn extract_drawing<'d>(document: &'d str, heading: &str) -> Vec<&'d str> {
    let mut drawing = Vec::new();
    let (mut is_in_section, mut is_in_fence) = (false, false);
    for line in document.lines() {
        if line.starts_with("```") {
            is_in_fence = !is_in_fence;
        } else if !is_in_fence && line.starts_with("## ") {
            is_in_section = line == heading;
        } else if is_in_section && is_in_fence {
            drawing.push(line);
        }
    }
    drawing
}

/// Parses the lines of a drawing of dependencies. A line `a <- b, c (remark)` means that crates b
/// and c may depend on crate a. `every crate` stands for all of `crates`. Returns an error if a
/// line names another crate, or if a crate does not occur.
pub(crate) fn parse_crate_arrows(lines: &[&str], crates: &BTreeSet<String>) -> Result<CrateArrows, String> {
    let mut arrows = CrateArrows::new();
    let mut drawn = BTreeSet::new();
    for line in lines.iter().filter(|line| !line.trim().is_empty()) {
        let without_remark = line.split('(').next().unwrap_or(line);
        let (to, dependents) = without_remark.split_once("<-").ok_or_else(|| format!("no arrow: {line}"))?;
        let to = to.trim();
        let dependents: Vec<&str> = match dependents.trim() {
            "every crate" => crates.iter().map(String::as_str).filter(|name| *name != to).collect(),
            names => names.split(',').map(str::trim).collect(),
        };
        for name in dependents.iter().chain([&to]) {
            if !crates.contains(*name) {
                return Err(format!("`{name}` is not a crate of the workspace: {line}"));
            }
            drawn.insert((*name).to_owned());
        }
        arrows.extend(dependents.iter().map(|from| ((*from).to_owned(), to.to_owned())));
    }
    match crates.difference(&drawn).next() {
        Some(missing) => Err(format!("the drawing lacks crate `{missing}`")),
        None => Ok(arrows),
    }
}

/// Parses a drawing of directories and files, an indented tree, and returns the path of each entry
/// from the repository root. The path of a directory ends with `/`. Two spaces separate the entries
/// of a line from their description. Entries below a file are relative to the directory of the
/// file.
pub(crate) fn parse_path_tree(lines: &[&str]) -> Result<Vec<String>, String> {
    let mut paths = Vec::new();
    let mut parents: Vec<(usize, PathBuf)> = Vec::new();
    for line in lines.iter().filter(|line| !line.trim().is_empty()) {
        let content = line.trim_start();
        let indent = line.len() - content.len();
        while parents.last().is_some_and(|(parent_indent, _)| *parent_indent >= indent) {
            parents.pop();
        }
        let base = parents.last().map(|(_, directory)| directory.clone()).unwrap_or_default();
        let entries = content.split("  ").next().unwrap_or(content);
        let mut directory = base.clone();
        for entry in entries.split(' ') {
            if !(entry.ends_with('/') || entry.contains('.')) {
                return Err(format!("`{entry}` is neither a directory nor a file: {line}"));
            }
            let path = base.join(entry);
            paths.push(path.to_string_lossy().into_owned());
            if entry.ends_with('/') {
                directory = path;
            }
        }
        parents.push((indent, directory));
    }
    Ok(paths)
}

/// Parses the layers of crates from lines of the form `CRATE: a < b, c < d`. Modules on the left
/// may not use modules on their right, and modules between two `<` may not use each other. An
/// indented line continues the previous one. Returns an error if a line is incomplete, or if a name
/// occurs twice.
pub(crate) fn parse_layers(lines: &[&str]) -> Result<Vec<CrateLayers>, String> {
    let mut definitions: Vec<String> = Vec::new();
    for line in lines.iter().filter(|line| !line.trim().is_empty()) {
        match definitions.last_mut() {
            Some(previous) if line.starts_with(' ') => *previous += line,
            _ => definitions.push((*line).to_owned()),
        }
    }
    let mut crates = Vec::<CrateLayers>::new();
    for definition in &definitions {
        let (name, order) = definition.split_once(':').ok_or_else(|| format!("no crate: {definition}"))?;
        let split_layer = |layer: &str| layer.split(',').map(|name| name.trim().to_owned()).collect();
        let layers: Vec<Vec<String>> = order.split('<').map(split_layer).collect();
        let mut names = BTreeSet::new();
        for module in layers.iter().flatten() {
            if module.is_empty() || module.contains(' ') {
                return Err(format!("`{module}` is not the name of a module: {definition}"));
            }
            if !names.insert(module) {
                return Err(format!("module `{module}` occurs twice: {definition}"));
            }
        }
        if crates.iter().any(|other| other.crate_name == name) {
            return Err(format!("crate `{name}` occurs twice"));
        }
        crates.push(CrateLayers { crate_name: name.to_owned(), layers });
    }
    Ok(crates)
}

/// Returns the differences between the layers and the sources of a crate: missing and unknown
/// modules, and edges to the same or a higher layer. The crate root may use every module, and no
/// module may use items that the crate root defines.
pub(crate) fn find_layer_violations(layers: &CrateLayers, graph: &ModuleGraph) -> Vec<String> {
    let crate_name = &layers.crate_name;
    let numbered = layers.layers.iter().enumerate();
    let layer_of: BTreeMap<&str, usize> =
        numbered.flat_map(|(layer, names)| names.iter().map(move |name| (name.as_str(), layer))).collect();
    let mut violations = Vec::new();
    for module in graph.top_level_modules.iter().filter(|module| !layer_of.contains_key(module.as_str())) {
        violations.push(format!("{crate_name}: module `{module}` has no layer"));
    }
    for module in layer_of.keys().filter(|module| !graph.top_level_modules.contains(**module)) {
        violations.push(format!("{crate_name}: module `{module}` does not exist"));
    }
    let find_layer = |module: Option<&str>| match module {
        Some(module) => layer_of.get(module).copied(),
        None => Some(usize::MAX),
    };
    for (from, to) in graph.edges.keys() {
        let from_module = graph.files[*from].top_level_module.as_deref();
        let to_module = graph.files[*to].top_level_module.as_deref();
        if from_module != to_module
            && let (Some(from_layer), Some(to_layer)) = (find_layer(from_module), find_layer(to_module))
            && to_layer >= from_layer
        {
            let from_name = from_module.unwrap_or("crate root");
            let to_name = to_module.unwrap_or("crate root");
            let edge = graph.format_edge(*from, *to);
            violations.push(format!("{crate_name}: {from_name} may not use {to_name}: {edge}"));
        }
    }
    violations
}

mod tests {
    use super::*;
    use crate::graph_tests::build_graph;

    #[test]
    fn drawings_are_the_fenced_blocks_of_a_section() {
        let document = "## A\ntext\n```\nx\n## y\n```\ntext\n```\nz\n```\n## AB\n```\nother\n```\n";
        assert_eq!(extract_drawing(document, "## A"), ["x", "## y", "z"]);
        assert!(extract_drawing(document, "## C").is_empty());
    }

    #[test]
    fn arrows_name_crates() {
        let crates = ["a", "b", "c"].map(str::to_owned).into();
        let arrows = parse_crate_arrows(&["a   <- every crate", "b <- c (remark <- a)"], &crates).unwrap();
        let expected = [("b", "a"), ("c", "a"), ("c", "b")];
        assert_eq!(arrows, expected.map(|(from, to)| (from.to_owned(), to.to_owned())).into());
        let check_error = |lines: &[&str], error: &str| {
            assert_eq!(parse_crate_arrows(lines, &crates), Err(error.to_owned()));
        };
        check_error(&["a <- b"], "the drawing lacks crate `c`");
        check_error(&["a <- b, d"], "`d` is not a crate of the workspace: a <- b, d");
        check_error(&["a, b"], "no arrow: a, b");
    }

    #[test]
    fn entries_of_a_tree_are_relative_to_their_parents() {
        let tree = "\
a/src/         text with b/ and c.rs
  b/           text
    c.rs d.rs  text
      d/
  e/ f/
g.md";
        let lines: Vec<&str> = tree.lines().collect();
        let expected = ["a/src/", "a/src/b/", "a/src/b/c.rs", "a/src/b/d.rs", "a/src/b/d/", "a/src/e/"];
        let paths = parse_path_tree(&lines).unwrap();
        assert_eq!(paths[..6], expected);
        assert_eq!(paths[6..], ["a/src/f/", "g.md"]);
        let error = parse_path_tree(&["a/ text"]).unwrap_err();
        assert_eq!(error, "`text` is neither a directory nor a file: a/ text");
    }

    #[test]
    fn layers_are_separated_by_less_than_signs() {
        let layers = parse_layers(&["x: a < b, c", "   < d", "y: e"]).unwrap();
        let names = |layers: &[&[&str]]| -> Vec<Vec<String>> {
            layers.iter().map(|names| names.iter().map(|name| (*name).to_owned()).collect()).collect()
        };
        let expected = [("x", names(&[&["a"], &["b", "c"], &["d"]])), ("y", names(&[&["e"]]))];
        let expected = expected.map(|(name, layers)| CrateLayers { crate_name: name.to_owned(), layers });
        assert_eq!(layers, expected);
        let check_error = |lines: &[&str], error: &str| {
            assert_eq!(parse_layers(lines), Err(error.to_owned()));
        };
        check_error(&["a < b"], "no crate: a < b");
        check_error(&["x: a < < b"], "`` is not the name of a module: x: a < < b");
        check_error(&["x: a b"], "`a b` is not the name of a module: x: a b");
        check_error(&["x: a < b, a"], "module `a` occurs twice: x: a < b, a");
        check_error(&["x: a", "x: b"], "crate `x` occurs twice");
    }

    #[test]
    fn modules_use_lower_layers_only() {
        let graph = build_graph(&[
            ("lib.rs", "mod a; mod b; mod c; mod d { pub(crate) mod e; } use d::e::E; pub struct Root;"),
            ("a.rs", "pub struct A;"),
            ("b.rs", "use crate::a::A; use crate::c::C; mod part; pub struct B;"),
            ("b/part.rs", "use super::B; use crate::Root;"),
            ("c.rs", "use crate::{a::A, d::e::E}; pub struct C;"),
            ("d/e.rs", "pub struct E;"),
        ]);
        let find = |line: &str| find_layer_violations(&parse_layers(&[line]).unwrap()[0], &graph);
        let to_root = "x: b may not use crate root: b/part.rs -> lib.rs: Root";
        assert_eq!(find("x: d < a < c < b"), [to_root]);
        let same_layer = "x: b may not use c: b.rs -> c.rs: C";
        assert_eq!(find("x: a, d < b, c"), [same_layer, to_root]);
        let upwards = "x: c may not use d: c.rs -> d/e.rs: E";
        assert_eq!(find("x: a < c < b < d"), [to_root, upwards]);
        let missing = "x: module `d` has no layer";
        assert_eq!(find("x: a < c < b < f"), [missing, "x: module `f` does not exist", to_root]);
    }
}
