//! [`ModuleGraph`]: the source files of a crate, with an edge from each file to every file whose
//! items it uses.
use crate::{
    crate_modules::{CrateModules, FileId, ItemKind, ItemName, PathSyntax, ROOT_MODULE, SourceFile},
    path_resolution::{PathTarget, resolve_path_use},
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The source files of a crate, and the items of other files that each file uses.
pub(crate) struct ModuleGraph {
    pub(crate) files: Vec<SourceFile>,
    /// The names of the modules that the crate root declares.
    pub(crate) top_level_modules: BTreeSet<String>,
    /// Maps each pair of files (A, B) to the names of the items of file B that file A uses.
    pub(crate) edges: BTreeMap<(FileId, FileId), BTreeSet<String>>,
    /// The items of other crates that the files use.
    pub(crate) external_uses: Vec<ExternalUse>,
    /// The paths that lead to no item, as messages. Empty for a crate that compiles.
    pub(crate) unresolved_paths: Vec<String>,
}

/// A place in the code of a crate that uses an item of another crate.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ExternalUse {
    /// The path of the source file.
    pub(crate) file: String,
    pub(crate) line: usize,
    /// The path of the item, such as `std::fs::read`.
    pub(crate) item: String,
}

/// Files that use each other in a cycle.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ModuleCycle {
    pub(crate) files: Vec<FileId>,
    /// Edges without which the files form no cycle. No edge can be omitted from the list.
    pub(crate) closing_edges: Vec<(FileId, FileId)>,
}

impl ModuleGraph {
    /// Builds the graph of a crate's files. A path in the code is an edge from its file to the file
    /// that defines the item. A path to a module is no edge.
    pub(crate) fn new(krate: CrateModules) -> ModuleGraph {
        let mut edges = BTreeMap::<_, BTreeSet<_>>::new();
        let mut external_uses = Vec::new();
        let mut unresolved_paths = Vec::new();
        for path_use in &krate.path_uses {
            let from = krate.modules[path_use.module].file;
            let location = || format!("{}:{}", krate.files[from].path, path_use.line);
            let targets = resolve_path_use(&krate, path_use).unwrap_or_else(|()| {
                if path_use.syntax != PathSyntax::Tokens {
                    unresolved_paths.push(format!("{}: {}", location(), path_use.segments.join("::")));
                }
                Vec::new()
            });
            for target in targets {
                match target {
                    PathTarget::Item { file, name, .. } if file != from => {
                        edges.entry((from, file)).or_default().insert(name);
                    }
                    PathTarget::External(item) => {
                        let file = krate.files[from].path.clone();
                        external_uses.push(ExternalUse { file, line: path_use.line, item });
                    }
                    PathTarget::Item { .. } | PathTarget::Module(_) => {}
                }
            }
        }
        let declares_module =
            |items: &[ItemName]| items.iter().any(|i| matches!(i.kind, ItemKind::Module(_)));
        let names = krate.modules[ROOT_MODULE].items.iter().filter(|(_, items)| declares_module(items));
        let top_level_modules = names.map(|(name, _)| name.clone()).collect();
        ModuleGraph { files: krate.files, top_level_modules, edges, external_uses, unresolved_paths }
    }

    /// Returns the cycles: the strongly connected components with more than one file.
    pub(crate) fn find_cycles(&self) -> Vec<ModuleCycle> {
        let mut successors = vec![Vec::new(); self.files.len()];
        for (from, to) in self.edges.keys() {
            successors[*from].push(*to);
        }
        let mut cycles: Vec<_> = find_strongly_connected_components(&successors)
            .into_iter()
            .filter(|files| files.len() > 1)
            .map(|files| ModuleCycle { closing_edges: self.select_closing_edges(&files), files })
            .collect();
        cycles.sort_by(|a, b| self.files[a.files[0]].path.cmp(&self.files[b.files[0]].path));
        cycles
    }

    /// Selects, for a cycle of files, edges whose removal would break every cycle among the files.
    /// Prefers edges with few names.
    fn select_closing_edges(&self, files: &[FileId]) -> Vec<(FileId, FileId)> {
        let mut edges: Vec<_> = self.list_edges_between(files).collect();
        edges.sort_by_key(|edge| (std::cmp::Reverse(self.edges[edge].len()), *edge));
        let (mut kept, mut closing) = (BTreeSet::new(), Vec::new());
        for (from, to) in edges {
            if find_shortest_path(&kept, to, from).is_some() {
                closing.push((from, to));
            } else {
                kept.insert((from, to));
            }
        }
        closing.sort();
        closing
    }

    /// Returns the edges of the graph from one of `files` to another one of `files`.
    pub(crate) fn list_edges_between(&self, files: &[FileId]) -> impl Iterator<Item = (FileId, FileId)> {
        self.edges.keys().copied().filter(|(from, to)| files.contains(from) && files.contains(to))
    }

    /// Formats a cycle as text for developers: its files and, for each closing edge, the names of
    /// the used items and the shortest way back.
    pub(crate) fn format_cycle(&self, cycle: &ModuleCycle) -> String {
        let files: Vec<&str> = cycle.files.iter().map(|file| self.files[*file].path.as_str()).collect();
        let mut text = format!("a cycle of {} files: {}\n", files.len(), files.join(" "));
        let inner: BTreeSet<_> = self.list_edges_between(&cycle.files).collect();
        let kept = inner.iter().filter(|edge| !cycle.closing_edges.contains(edge)).copied().collect();
        for (from, to) in &cycle.closing_edges {
            text += &format!("  {}\n", self.format_edge(*from, *to));
            let way_back = find_shortest_path(&kept, *to, *from).unwrap_or_default();
            for pair in way_back.windows(2) {
                text += &format!("    and {}\n", self.format_edge(pair[0], pair[1]));
            }
        }
        text
    }

    /// Formats an edge as `file -> file: names`.
    pub(crate) fn format_edge(&self, from: FileId, to: FileId) -> String {
        let names: Vec<&str> = self.edges[&(from, to)].iter().map(String::as_str).collect();
        format!("{} -> {}: {}", self.files[from].path, self.files[to].path, names.join(", "))
    }
}

/// Returns the nodes of a shortest path along the edges, with both ends.
fn find_shortest_path(edges: &BTreeSet<(FileId, FileId)>, from: FileId, to: FileId) -> Option<Vec<FileId>> {
    let mut previous = BTreeMap::from([(from, from)]);
    let mut queue = VecDeque::from([from]);
    while let Some(node) = queue.pop_front() {
        if node == to {
            let mut path = vec![to];
            while let Some(last) = path.last().filter(|last| **last != from) {
                path.push(previous[last]);
            }
            path.reverse();
            return Some(path);
        }
        for (_, next) in edges.range((node, 0)..(node + 1, 0)) {
            if !previous.contains_key(next) {
                previous.insert(*next, node);
                queue.push_back(*next);
            }
        }
    }
    None
}

/// Returns the strongly connected components of a graph, each sorted, by Tarjan's algorithm.
fn find_strongly_connected_components(successors: &[Vec<usize>]) -> Vec<Vec<usize>> {
    let mut search = ComponentSearch {
        successors,
        index: vec![None; successors.len()],
        low_link: vec![0; successors.len()],
        stack: Vec::new(),
        count: 0,
        components: Vec::new(),
    };
    for node in 0..successors.len() {
        if search.index[node].is_none() {
            search.visit_node(node);
        }
    }
    search.components
}

/// The state of Tarjan's algorithm, which finds strongly connected components.
struct ComponentSearch<'a> {
    successors: &'a [Vec<usize>],
    /// For each node, its number in the order in which the nodes were visited.
    index: Vec<Option<usize>>,
    /// The smallest index that is known to be reachable from a node and still on the stack.
    low_link: Vec<usize>,
    stack: Vec<usize>,
    count: usize,
    components: Vec<Vec<usize>>,
}

impl ComponentSearch<'_> {
    /// Visits a node and every node that can be reached from it (the recursive step of Tarjan's
    /// algorithm).
    fn visit_node(&mut self, node: usize) {
        let index = self.count;
        self.count += 1;
        self.index[node] = Some(index);
        self.low_link[node] = index;
        self.stack.push(node);
        for next in self.successors[node].iter().copied() {
            match self.index[next] {
                None => {
                    self.visit_node(next);
                    self.low_link[node] = self.low_link[node].min(self.low_link[next]);
                }
                Some(next_index) if self.stack.contains(&next) => {
                    self.low_link[node] = self.low_link[node].min(next_index);
                }
                Some(_) => {}
            }
        }
        if self.low_link[node] == index
            && let Some(start) = self.stack.iter().position(|other| *other == node)
        {
            let mut component = self.stack.split_off(start);
            component.sort_unstable();
            self.components.push(component);
        }
    }
}
