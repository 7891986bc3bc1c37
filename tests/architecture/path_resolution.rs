//! Resolves the paths in the code of a crate to the files that define the named items.
use crate::crate_modules::{
    CrateModules, FileId, Import, ItemKind, Module, ModuleId, PathSyntax, PathUse, ROOT_MODULE,
};

/// What a path in the code of a crate refers to: a module, an item, or an item of another crate.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PathTarget {
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
pub(crate) fn resolve_path_use(krate: &CrateModules, path_use: &PathUse) -> Result<Vec<PathTarget>, ()> {
    let mut resolver = Resolver { krate, imports_in_progress: Vec::new() };
    let mut targets = resolver.resolve_path(path_use.module, &path_use.segments, PathOrigin::Code)?;
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
enum PathOrigin {
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
        origin: PathOrigin,
    ) -> Result<Vec<PathTarget>, ()> {
        let Some((first, rest)) = segments.split_first() else { return Ok(Vec::new()) };
        let mut targets = self.resolve_first_name(module, first);
        if targets.is_empty() && (origin == PathOrigin::Import || !rest.is_empty()) {
            targets.push(PathTarget::External(first.clone()));
        }
        for name in rest {
            targets = self.resolve_next_name(module, targets, name)?;
        }
        Ok(targets)
    }

    /// Resolves the first name of a path: a keyword, or a name of the module or an enclosing block.
    fn resolve_first_name(&mut self, module: ModuleId, name: &str) -> Vec<PathTarget> {
        let modules = &self.krate.modules;
        let mut scope = module;
        if let "self" | "super" = name {
            while modules[scope].is_block {
                scope = modules[scope].parent.unwrap_or(ROOT_MODULE);
            }
        }
        match name {
            "crate" => return vec![PathTarget::Module(ROOT_MODULE)],
            "self" => return vec![PathTarget::Module(scope)],
            "super" => return vec![PathTarget::Module(modules[scope].parent.unwrap_or(ROOT_MODULE))],
            "" => return vec![PathTarget::External(String::new())],
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
    fn resolve_next_name(
        &mut self,
        module: ModuleId,
        targets: Vec<PathTarget>,
        name: &str,
    ) -> Result<Vec<PathTarget>, ()> {
        let mut next = Vec::new();
        let mut is_undefined = false;
        for target in targets {
            match target {
                PathTarget::Module(id) if name == "super" => {
                    let parent = self.krate.modules[id].parent.unwrap_or(ROOT_MODULE);
                    next.push(PathTarget::Module(parent));
                }
                PathTarget::Module(id) => {
                    let mut found = self.find_name(id, name, module);
                    if found.is_empty() && self.krate.modules[id].has_item_macros {
                        let file = self.krate.modules[id].file;
                        found.push(PathTarget::Item { file, name: name.to_owned(), kind: ItemKind::Type });
                    }
                    is_undefined |= found.is_empty();
                    next.extend(found);
                }
                // an associated item, or a variant
                PathTarget::Item { kind: ItemKind::Type, .. } => next.push(target),
                PathTarget::Item { .. } => {}
                PathTarget::External(path) if path.is_empty() => {
                    next.push(PathTarget::External(name.to_owned()))
                }
                PathTarget::External(path) => next.push(PathTarget::External(format!("{path}::{name}"))),
            }
        }
        next.sort();
        next.dedup();
        if next.is_empty() && is_undefined { Err(()) } else { Ok(next) }
    }

    /// Finds a name in a module: its items and imports, then its glob imports. `user` is the module
    /// that uses the name.
    fn find_name(&mut self, module: ModuleId, name: &str, user: ModuleId) -> Vec<PathTarget> {
        let krate = self.krate;
        let Module { file, items, imports, glob_imports, .. } = &krate.modules[module];
        let sees_private = self.is_within(user, module);
        let mut targets = Vec::new();
        for item in items.get(name).into_iter().flatten().filter(|item| sees_private || !item.is_private) {
            targets.push(match item.kind {
                ItemKind::Module(id) => PathTarget::Module(id),
                kind => PathTarget::Item { file: *file, name: name.to_owned(), kind },
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
                        PathTarget::Module(id) => {
                            self.imports_in_progress.push(import);
                            targets.extend(self.find_name(id, name, module));
                            self.imports_in_progress.pop();
                        }
                        PathTarget::External(_) if module != user => {
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
    fn resolve_import(&mut self, module: ModuleId, import: &'k Import) -> Vec<PathTarget> {
        if self.imports_in_progress.iter().any(|other| std::ptr::eq(*other, import)) {
            return Vec::new();
        }
        self.imports_in_progress.push(import);
        let targets = self.resolve_path(module, &import.segments, PathOrigin::Import).unwrap_or_default();
        self.imports_in_progress.pop();
        targets
    }

    /// Returns the items of other crates that the name `name` may refer to, through the module's
    /// glob imports.
    fn list_external_candidates(&mut self, module: ModuleId, name: &str) -> Vec<PathTarget> {
        let krate = self.krate;
        let mut candidates = Vec::new();
        for import in &krate.modules[module].glob_imports {
            for target in self.resolve_import(module, import) {
                if let PathTarget::External(path) = target {
                    candidates.push(PathTarget::External(format!("{path}::{name}")));
                }
            }
        }
        candidates
    }

    /// Finds a `macro_rules!` macro that an enclosing module defines. Such a macro is in scope in
    /// the modules below its definition without an import.
    fn find_macro_in_ancestors(&self, module: ModuleId, name: &str) -> Option<PathTarget> {
        let mut ancestor = Some(module);
        while let Some(Module { parent, file, items, .. }) = ancestor.map(|id| &self.krate.modules[id]) {
            if items.get(name).is_some_and(|items| items.iter().any(|item| item.kind == ItemKind::Macro)) {
                return Some(PathTarget::Item { file: *file, name: name.to_owned(), kind: ItemKind::Macro });
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
