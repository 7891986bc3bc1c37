//! Resolves the paths in the code of a crate to the files that define the named items.
use crate::crate_modules::{
    CrateModules, FileId, Import, ItemKind, Module, ModuleId, PathSyntax, PathUse, ROOT,
};

/// What a path in the code of a crate refers to: a module, an item, or an item of another crate.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Target {
    /// A module of the crate.
    Module(ModuleId),
    /// An item of the crate, or an associated item or variant of it.
    Item { file: FileId, name: String, kind: ItemKind },
    /// An item of another crate, or of the prelude.
    External(String),
}

/// Returns the modules or items that `path_use` names. A path can name several things: a function
/// and a module of one name, and definitions for different targets. Returns an error if the path
/// leads to a module that does not define the next name.
pub(crate) fn resolve_path_use(krate: &CrateModules, path_use: &PathUse) -> Result<Vec<Target>, ()> {
    let mut resolver = Resolver { krate, imports_in_progress: Vec::new() };
    let mut targets = resolver.resolve_path(path_use.module, &path_use.segments, Origin::Code)?;
    if let ([name], PathSyntax::Macro) = (&path_use.segments[..], path_use.syntax) {
        targets.extend(resolver.find_macro_in_ancestors(path_use.module, name));
    }
    if let ([name], []) = (&path_use.segments[..], &targets[..]) {
        targets = resolver.list_external_candidates(path_use.module, name);
    }
    Ok(targets)
}

/// The state of resolving one path. `imports_in_progress` ends cycles of imports.
struct Resolver<'k> {
    krate: &'k CrateModules,
    imports_in_progress: Vec<&'k Import>,
}

/// The kind of place in which a path is written, which decides what its first name can refer to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// Code other than imports, where a path with one name can be a local variable or a generic
    /// parameter.
    Code,
    /// An import (`use`), where a path with one name must be an item or a crate.
    Import,
}

impl<'k> Resolver<'k> {
    /// Resolves a path in the code of a module.
    fn resolve_path(
        &mut self,
        module: ModuleId,
        segments: &[String],
        origin: Origin,
    ) -> Result<Vec<Target>, ()> {
        let Some((first, rest)) = segments.split_first() else { return Ok(Vec::new()) };
        let mut targets = self.resolve_first(module, first);
        if targets.is_empty() && (origin == Origin::Import || !rest.is_empty()) {
            targets.push(Target::External(first.clone()));
        }
        for name in rest {
            targets = self.resolve_next(module, targets, name)?;
        }
        Ok(targets)
    }

    /// Resolves the first name of a path: a keyword, or a name of the module or an enclosing block.
    fn resolve_first(&mut self, module: ModuleId, name: &str) -> Vec<Target> {
        let modules = &self.krate.modules;
        let mut scope = module;
        if let "self" | "super" = name {
            while modules[scope].is_block {
                scope = modules[scope].parent.unwrap_or(ROOT);
            }
        }
        match name {
            "crate" => return vec![Target::Module(ROOT)],
            "self" => return vec![Target::Module(scope)],
            "super" => return vec![Target::Module(modules[scope].parent.unwrap_or(ROOT))],
            "" => return vec![Target::External(String::new())],
            _ => {}
        }
        loop {
            let targets = self.find_name(scope, name, scope);
            match modules[scope].parent.filter(|_| modules[scope].is_block && targets.is_empty()) {
                Some(parent) => scope = parent,
                None => return targets,
            }
        }
    }

    /// Resolves the next name of a path, after the names before it were resolved. `targets` are the
    /// modules or items that the part before the name refers to.
    fn resolve_next(
        &mut self,
        module: ModuleId,
        targets: Vec<Target>,
        name: &str,
    ) -> Result<Vec<Target>, ()> {
        let mut next = Vec::new();
        let mut is_undefined = false;
        for target in targets {
            match target {
                Target::Module(id) if name == "super" => {
                    let parent = self.krate.modules[id].parent.unwrap_or(ROOT);
                    next.push(Target::Module(parent));
                }
                Target::Module(id) => {
                    let mut found = self.find_name(id, name, module);
                    if found.is_empty() && self.krate.modules[id].has_item_macros {
                        let file = self.krate.modules[id].file;
                        found.push(Target::Item { file, name: name.to_owned(), kind: ItemKind::Type });
                    }
                    is_undefined |= found.is_empty();
                    next.extend(found);
                }
                // an associated item, or a variant
                Target::Item { kind: ItemKind::Type, .. } => next.push(target),
                Target::Item { .. } => {}
                Target::External(path) if path.is_empty() => next.push(Target::External(name.to_owned())),
                Target::External(path) => next.push(Target::External(format!("{path}::{name}"))),
            }
        }
        next.sort();
        next.dedup();
        if next.is_empty() && is_undefined { Err(()) } else { Ok(next) }
    }

    /// Finds a name in a module: its items and imports, then its glob imports. `user` is the module
    /// that uses the name.
    fn find_name(&mut self, module: ModuleId, name: &str, user: ModuleId) -> Vec<Target> {
        let krate = self.krate;
        let Module { file, items, imports, glob_imports, .. } = &krate.modules[module];
        let sees_private = self.is_within(user, module);
        let mut targets = Vec::new();
        for item in items.get(name).into_iter().flatten().filter(|item| sees_private || !item.is_private) {
            targets.push(match item.kind {
                ItemKind::Module(id) => Target::Module(id),
                kind => Target::Item { file: *file, name: name.to_owned(), kind },
            });
        }
        for import in imports.get(name).into_iter().flatten() {
            if sees_private || !import.is_private {
                targets.extend(self.resolve_import(module, import));
            }
        }
        if targets.is_empty() {
            for import in glob_imports.iter().filter(|import| sees_private || !import.is_private) {
                for target in self.resolve_import(module, import) {
                    match target {
                        Target::Module(id) => {
                            self.imports_in_progress.push(import);
                            targets.extend(self.find_name(id, name, module));
                            self.imports_in_progress.pop();
                        }
                        Target::External(_) if module != user => {
                            targets.extend(self.list_external_candidates(module, name));
                        }
                        _ => {}
                    }
                }
            }
        }
        targets.sort();
        targets.dedup();
        targets
    }

    /// Resolves the path of an import. Returns nothing for an import that is being resolved.
    fn resolve_import(&mut self, module: ModuleId, import: &'k Import) -> Vec<Target> {
        if self.imports_in_progress.iter().any(|other| std::ptr::eq(*other, import)) {
            return Vec::new();
        }
        self.imports_in_progress.push(import);
        let targets = self.resolve_path(module, &import.segments, Origin::Import).unwrap_or_default();
        self.imports_in_progress.pop();
        targets
    }

    /// Returns the items of other crates that the name `name` may refer to, through the module's
    /// glob imports.
    fn list_external_candidates(&mut self, module: ModuleId, name: &str) -> Vec<Target> {
        let krate = self.krate;
        let mut candidates = Vec::new();
        for import in &krate.modules[module].glob_imports {
            for target in self.resolve_import(module, import) {
                if let Target::External(path) = target {
                    candidates.push(Target::External(format!("{path}::{name}")));
                }
            }
        }
        candidates
    }

    /// Finds a `macro_rules!` macro that an enclosing module defines. Such a macro is in scope in
    /// the modules below its definition without an import.
    fn find_macro_in_ancestors(&self, module: ModuleId, name: &str) -> Option<Target> {
        let mut ancestor = Some(module);
        while let Some(Module { parent, file, items, .. }) = ancestor.map(|id| &self.krate.modules[id]) {
            if items.get(name).is_some_and(|items| items.iter().any(|item| item.kind == ItemKind::Macro)) {
                return Some(Target::Item { file: *file, name: name.to_owned(), kind: ItemKind::Macro });
            }
            ancestor = *parent;
        }
        None
    }

    /// Returns whether the module `inner` is `outer` or one of its descendants, which see its
    /// private names.
    fn is_within(&self, inner: ModuleId, outer: ModuleId) -> bool {
        let mut ancestor = Some(inner);
        while let Some(id) = ancestor.filter(|id| *id != outer) {
            ancestor = self.krate.modules[id].parent;
        }
        ancestor.is_some()
    }
}
