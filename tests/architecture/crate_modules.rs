//! Reads the sources of a crate: its modules, the names that each module defines and imports, and
//! the paths that the code of each module uses.
use proc_macro2::{TokenStream, TokenTree};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};
use syn::{
    Attribute, ForeignItem, Ident, Item, ItemMod, Meta, Stmt, Token, UseTree, Visibility,
    punctuated::Punctuated,
    visit::{self, Visit},
};

/// The index of a source file in [`CrateModules::files`].
pub(crate) type FileId = usize;
/// The index of a module in [`CrateModules::modules`].
pub(crate) type ModuleId = usize;

/// The index of the crate root in [`CrateModules::modules`].
pub(crate) const ROOT_MODULE: ModuleId = 0;

/// The modules, files and paths of a crate, without `#[cfg(test)]` items.
#[derive(Default)]
pub(crate) struct CrateModules {
    pub(crate) files: Vec<SourceFile>,
    pub(crate) modules: Vec<Module>,
    pub(crate) path_uses: Vec<PathUse>,
}

/// A source file of the crate.
pub(crate) struct SourceFile {
    /// The path from the repository root.
    pub(crate) path: String,
    /// The name of the top-level module that contains the file. `None` for the file of the crate
    /// root.
    pub(crate) top_level_module: Option<String>,
}

/// A module of the crate, or a block of code that contains items.
pub(crate) struct Module {
    pub(crate) name: String,
    pub(crate) file: FileId,
    pub(crate) parent: Option<ModuleId>,
    /// Whether this is a block of code instead of a module. A block inherits the names of its
    /// parent.
    pub(crate) is_block: bool,
    pub(crate) items: BTreeMap<String, Vec<ItemName>>,
    pub(crate) imports: BTreeMap<String, Vec<Import>>,
    pub(crate) glob_imports: Vec<Import>,
    /// Whether the module invokes a macro in place of items. Such a module may define names that
    /// are not in `items`.
    pub(crate) has_item_macros: bool,
}

/// A name that an item of a module defines.
pub(crate) struct ItemName {
    pub(crate) kind: ItemKind,
    pub(crate) is_private: bool,
}

/// The kind of an item, such as a module or a type, which decides what can follow the item's name
/// in a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ItemKind {
    /// A struct, enum, union, trait or type alias, which can have associated items.
    Type,
    /// A function, constant or static.
    Value,
    Macro,
    Module(ModuleId),
}

/// A `use` declaration of one name, or of every name of a module.
pub(crate) struct Import {
    pub(crate) segments: Vec<String>,
    pub(crate) is_private: bool,
}

/// A path in the code of a module, such as `super::plan::Plan`.
pub(crate) struct PathUse {
    pub(crate) module: ModuleId,
    pub(crate) line: usize,
    /// The identifiers of the path. The first one is empty if the path starts with `::`.
    pub(crate) segments: Vec<String>,
    pub(crate) syntax: PathSyntax,
}

/// The kind of source text in which a path was found.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum PathSyntax {
    /// An import, expression, type, pattern or bound. The path must resolve.
    Code,
    /// The name of an invoked macro.
    Macro,
    /// The tokens of a macro or attribute, which need not be a path.
    Tokens,
}

/// Reads all modules of a crate: the root file, and the files of its `mod` declarations.
/// `read_file` returns the text of a file, or `None` if the file does not exist. Returns an error
/// if a file of a module is missing, or is not valid Rust.
pub(crate) fn read_crate(
    root_path: &Path,
    read_file: &dyn Fn(&Path) -> Option<String>,
) -> Result<CrateModules, String> {
    let mut reader = CrateReader {
        read_file,
        krate: CrateModules::default(),
        module: ROOT_MODULE,
        file: 0,
        directory: root_path.parent().unwrap_or(Path::new("")).to_owned(),
        is_inline: false,
        errors: Vec::new(),
    };
    reader.krate.modules.push(Module::new("crate", 0, None));
    reader.read_file(root_path, None);
    if reader.errors.is_empty() { Ok(reader.krate) } else { Err(reader.errors.join("\n")) }
}

impl Module {
    fn new(name: &str, file: FileId, parent: Option<ModuleId>) -> Module {
        Module {
            name: name.to_owned(),
            file,
            parent,
            is_block: false,
            items: BTreeMap::new(),
            imports: BTreeMap::new(),
            glob_imports: Vec::new(),
            has_item_macros: false,
        }
    }
}

/// The state of [`read_crate`]: the modules that were read so far, and the module that is being
/// read.
struct CrateReader<'a> {
    read_file: &'a dyn Fn(&Path) -> Option<String>,
    krate: CrateModules,
    module: ModuleId,
    file: FileId,
    /// The directory with the files of the current module's children.
    directory: PathBuf,
    /// Whether the current module is declared with its content (`mod name { … }`). The directory of
    /// such a module differs from that of its file.
    is_inline: bool,
    errors: Vec<String>,
}

impl CrateReader<'_> {
    /// Reads the file `path` of the current module, and the modules that the file declares.
    fn read_file(&mut self, path: &Path, top_level_module: Option<String>) {
        let name = path.to_string_lossy().into_owned();
        let syntax = match (self.read_file)(path) {
            Some(text) => {
                syn::parse_file(&text).map_err(|e| format!("{name}:{}: {e}", e.span().start().line))
            }
            None => Err(format!("{name}: the file does not exist")),
        };
        self.file = self.krate.files.len();
        self.krate.files.push(SourceFile { path: name, top_level_module });
        self.krate.modules[self.module].file = self.file;
        match syntax {
            Ok(syntax) => self.visit_file(&syntax),
            Err(error) => self.errors.push(error),
        }
    }

    /// Reads a module that is declared as `mod name;` or `mod name { … }`.
    fn read_module(&mut self, declaration: &ItemMod) {
        let name = declaration.ident.to_string();
        let outer = (self.module, self.file, self.directory.clone(), self.is_inline);
        let module = self.push_module(&name);
        self.define_name(&declaration.ident, ItemKind::Module(module), is_private(&declaration.vis));
        self.module = module;
        match &declaration.content {
            Some((_, items)) => {
                self.directory.push(&name);
                self.is_inline = true;
                items.iter().for_each(|item| self.visit_item(item));
            }
            None => {
                let (path, directory) = self.find_module_file(&name, &declaration.attrs);
                self.directory = directory;
                self.is_inline = false;
                let top_level_module = self.find_top_level_module();
                self.read_file(&path, Some(top_level_module));
            }
        }
        (self.module, self.file, self.directory, self.is_inline) = outer;
    }

    /// Returns the path of the file of module `name`, which is declared in the current module, and
    /// the directory with the files of its children.
    fn find_module_file(&self, name: &str, attributes: &[Attribute]) -> (PathBuf, PathBuf) {
        let path_attribute = attributes.iter().find_map(|attribute| match &attribute.meta {
            Meta::NameValue(meta) if meta.path.is_ident("path") => read_string_literal(&meta.value),
            _ => None,
        });
        let file_directory = Path::new(&self.krate.files[self.file].path).parent().unwrap_or(Path::new(""));
        if let Some(path) = path_attribute {
            let path = if self.is_inline { self.directory.join(path) } else { file_directory.join(path) };
            let directory = path.parent().unwrap_or(Path::new("")).to_owned();
            return (path, directory);
        }
        let directory = self.directory.join(name);
        let file = directory.with_extension("rs");
        let in_directory = directory.join("mod.rs");
        let is_in_directory = (self.read_file)(&file).is_none() && (self.read_file)(&in_directory).is_some();
        (if is_in_directory { in_directory } else { file }, directory)
    }

    /// Returns the name of the module of the crate root that contains the current module.
    fn find_top_level_module(&self) -> String {
        let mut module = self.module;
        while let Some(parent) = self.krate.modules[module].parent.filter(|parent| *parent != ROOT_MODULE) {
            module = parent;
        }
        self.krate.modules[module].name.clone()
    }

    /// Adds a module with the name `name` as a child of the current module. It is part of the
    /// current file.
    fn push_module(&mut self, name: &str) -> ModuleId {
        self.krate.modules.push(Module::new(name, self.file, Some(self.module)));
        self.krate.modules.len() - 1
    }

    /// Adds `name` to the names that the current module defines.
    fn define_name(&mut self, name: &Ident, kind: ItemKind, is_private: bool) {
        let items = &mut self.krate.modules[self.module].items;
        items.entry(name.to_string()).or_default().push(ItemName { kind, is_private });
    }

    /// Adds the name that `item` defines to the names of the current module.
    fn define_item(&mut self, item: &Item) {
        match item {
            Item::Const(i) => self.define_name(&i.ident, ItemKind::Value, is_private(&i.vis)),
            Item::Enum(i) => self.define_name(&i.ident, ItemKind::Type, is_private(&i.vis)),
            Item::Fn(i) => self.define_name(&i.sig.ident, ItemKind::Value, is_private(&i.vis)),
            Item::Static(i) => self.define_name(&i.ident, ItemKind::Value, is_private(&i.vis)),
            Item::Struct(i) => self.define_name(&i.ident, ItemKind::Type, is_private(&i.vis)),
            Item::Trait(i) => self.define_name(&i.ident, ItemKind::Type, is_private(&i.vis)),
            Item::Type(i) => self.define_name(&i.ident, ItemKind::Type, is_private(&i.vis)),
            Item::Union(i) => self.define_name(&i.ident, ItemKind::Type, is_private(&i.vis)),
            Item::Use(i) => {
                let prefix = if i.leading_colon.is_some() { vec![String::new()] } else { Vec::new() };
                self.add_imports(prefix, &i.tree, is_private(&i.vis));
            }
            Item::ForeignMod(i) => {
                for item in &i.items {
                    match item {
                        ForeignItem::Fn(f) => {
                            self.define_name(&f.sig.ident, ItemKind::Value, is_private(&f.vis))
                        }
                        ForeignItem::Static(s) => {
                            self.define_name(&s.ident, ItemKind::Value, is_private(&s.vis))
                        }
                        _ => {}
                    }
                }
            }
            Item::Macro(i) => match &i.ident {
                Some(name) => {
                    let is_exported = i.attrs.iter().any(|a| a.path().is_ident("macro_export"));
                    self.define_name(name, ItemKind::Macro, !is_exported);
                    if is_exported {
                        let import = Import { segments: self.build_item_path(name), is_private: false };
                        self.krate.modules[ROOT_MODULE]
                            .imports
                            .entry(name.to_string())
                            .or_default()
                            .push(import);
                    }
                }
                None => self.krate.modules[self.module].has_item_macros = true,
            },
            _ => {}
        }
    }

    /// Returns the path from the crate root to the item `name` of the current module.
    fn build_item_path(&self, name: &Ident) -> Vec<String> {
        let mut segments = vec![name.to_string()];
        let mut module = Some(self.module);
        while let Some(id) = module {
            segments.push(self.krate.modules[id].name.clone());
            module = self.krate.modules[id].parent;
        }
        segments.reverse();
        segments
    }

    /// Adds to the current module the names that `tree`, a part of a `use` declaration, imports.
    fn add_imports(&mut self, mut prefix: Vec<String>, tree: &UseTree, is_private: bool) {
        let (line, name) = match tree {
            UseTree::Path(path) => {
                prefix.push(path.ident.to_string());
                return self.add_imports(prefix, &path.tree, is_private);
            }
            UseTree::Group(group) => {
                return group
                    .items
                    .iter()
                    .for_each(|tree| self.add_imports(prefix.clone(), tree, is_private));
            }
            UseTree::Glob(glob) => (glob.star_token.span.start().line, None),
            UseTree::Name(name) => {
                if name.ident != "self" {
                    prefix.push(name.ident.to_string());
                }
                (name.ident.span().start().line, prefix.last().cloned())
            }
            UseTree::Rename(rename) => {
                if rename.ident != "self" {
                    prefix.push(rename.ident.to_string());
                }
                (rename.ident.span().start().line, Some(rename.rename.to_string()))
            }
        };
        let module = &mut self.krate.modules[self.module];
        let import = Import { segments: prefix.clone(), is_private };
        match name {
            Some(name) => module.imports.entry(name).or_default().push(import),
            None => module.glob_imports.push(import),
        }
        self.push_path(prefix, line, PathSyntax::Code);
    }

    /// Records that the code of the current module contains the path `segments`.
    fn push_path(&mut self, segments: Vec<String>, line: usize, syntax: PathSyntax) {
        self.krate.path_uses.push(PathUse { module: self.module, line, segments, syntax });
    }

    /// Records that the code of the current module contains the parsed path `path`, unless it
    /// starts with `Self`.
    fn push_syntax_path(&mut self, path: &syn::Path, syntax: PathSyntax) {
        let segments = path.segments.iter().map(|segment| segment.ident.to_string());
        let segments: Vec<_> = path.leading_colon.iter().map(|_| String::new()).chain(segments).collect();
        // `Self` is the type of the surrounding impl block, whose header names it
        if let Some(first) = path.segments.first().filter(|first| first.ident != "Self") {
            self.push_path(segments, first.ident.span().start().line, syntax);
        }
    }

    /// Records the identifiers and paths such as `a::b` in the tokens of a macro, which may name
    /// items.
    fn scan_tokens(&mut self, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let is_punct =
            |at: usize, c: char| matches!(tokens.get(at), Some(TokenTree::Punct(p)) if p.as_char() == c);
        let is_separator = |at: usize| is_punct(at, ':') && is_punct(at + 1, ':');
        let mut at = 0;
        while at < tokens.len() {
            let start = at;
            at += 1;
            let first = match &tokens[start] {
                TokenTree::Group(group) => {
                    self.scan_tokens(group.stream());
                    continue;
                }
                TokenTree::Ident(ident) => ident,
                _ => continue,
            };
            let mut segments = vec![first.to_string()];
            while is_separator(at)
                && let Some(TokenTree::Ident(next)) = tokens.get(at + 2)
            {
                segments.push(next.to_string());
                at += 3;
            }
            // skips fields, lifetimes, macro variables, and the end of a path after its generics
            let before = |distance: usize, c: char| start >= distance && is_punct(start - distance, c);
            let is_field = before(1, '.') && !before(2, '.');
            let is_variable = before(1, '$') && first != "crate";
            let is_continued = before(1, ':') && before(2, ':');
            if !(is_field || is_variable || is_continued || before(1, '\'') || first == "Self") {
                let is_macro = is_punct(at, '!') && !is_punct(at + 1, '=');
                let syntax = if is_macro { PathSyntax::Macro } else { PathSyntax::Tokens };
                self.push_path(segments, first.span().start().line, syntax);
            }
        }
    }
}

/// Defines visitor methods that skip `#[cfg(test)]` syntax.
macro_rules! skip_test_only {
    ($($visit:ident($syntax:ident)),* $(,)?) => {
        $(fn $visit(&mut self, node: &'ast syn::$syntax) {
            if !is_test_only(&node.attrs) {
                visit::$visit(self, node);
            }
        })*
    };
}

impl<'ast> Visit<'ast> for CrateReader<'_> {
    skip_test_only! {
        visit_arm(Arm), visit_field(Field), visit_field_value(FieldValue), visit_local(Local),
        visit_impl_item_const(ImplItemConst), visit_impl_item_fn(ImplItemFn),
        visit_impl_item_type(ImplItemType), visit_trait_item_fn(TraitItemFn), visit_variant(Variant),
    }

    fn visit_item(&mut self, item: &'ast Item) {
        if is_test_only(list_attributes(item)) {
            return;
        }
        self.define_item(item);
        match item {
            Item::Mod(module) => self.read_module(module),
            Item::Use(_) => {}
            _ => visit::visit_item(self, item),
        }
    }

    fn visit_block(&mut self, block: &'ast syn::Block) {
        let outer = self.module;
        if block.stmts.iter().any(|statement| matches!(statement, Stmt::Item(_))) {
            self.module = self.push_module("{block}");
            self.krate.modules[self.module].is_block = true;
        }
        visit::visit_block(self, block);
        self.module = outer;
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.push_syntax_path(path, PathSyntax::Code);
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, invocation: &'ast syn::Macro) {
        self.push_syntax_path(&invocation.path, PathSyntax::Macro);
        self.scan_tokens(invocation.tokens.clone());
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        let is_inert = ["doc", "derive", "cfg", "cfg_attr", "allow", "expect", "path"];
        match &attribute.meta {
            Meta::List(list) if !is_inert.iter().any(|name| list.path.is_ident(name)) => {
                self.scan_tokens(list.tokens.clone());
                for path in list_serde_paths(list) {
                    self.push_syntax_path(&path, PathSyntax::Tokens);
                }
            }
            _ => {}
        }
    }

    // `pub(in path)` names an ancestor, which is no import
    fn visit_visibility(&mut self, _: &'ast Visibility) {}
}

/// Returns whether an item is visible only within its module and the descendants of the module.
fn is_private(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Inherited)
}

/// Returns the attributes of an item.
fn list_attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(i) => &i.attrs,
        Item::Enum(i) => &i.attrs,
        Item::ExternCrate(i) => &i.attrs,
        Item::Fn(i) => &i.attrs,
        Item::ForeignMod(i) => &i.attrs,
        Item::Impl(i) => &i.attrs,
        Item::Macro(i) => &i.attrs,
        Item::Mod(i) => &i.attrs,
        Item::Static(i) => &i.attrs,
        Item::Struct(i) => &i.attrs,
        Item::Trait(i) => &i.attrs,
        Item::Type(i) => &i.attrs,
        Item::Union(i) => &i.attrs,
        Item::Use(i) => &i.attrs,
        _ => &[],
    }
}

/// Returns whether an item exists only in test builds, because of an attribute such as
/// `#[cfg(test)]`.
fn is_test_only(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.parse_args::<Meta>().is_ok_and(|meta| requires_test(&meta))
    })
}

/// Returns whether the condition of a `#[cfg]` attribute can hold only in test builds.
fn requires_test(condition: &Meta) -> bool {
    let list_conditions = |list: &syn::MetaList| {
        list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated).unwrap_or_default()
    };
    match condition {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) if list.path.is_ident("all") => list_conditions(list).iter().any(requires_test),
        Meta::List(list) if list.path.is_ident("any") => {
            let conditions = list_conditions(list);
            !conditions.is_empty() && conditions.iter().all(requires_test)
        }
        _ => false,
    }
}

/// Returns the paths of functions and types that a `#[serde(…)]` attribute contains as string
/// literals.
fn list_serde_paths(attribute: &syn::MetaList) -> Vec<syn::Path> {
    const KEYS: [&str; 9] = [
        "default",
        "with",
        "serialize_with",
        "deserialize_with",
        "from",
        "try_from",
        "into",
        "remote",
        "skip_serializing_if",
    ];
    if !attribute.path.is_ident("serde") {
        return Vec::new();
    }
    let arguments = attribute.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated);
    let paths = arguments.into_iter().flatten().filter_map(|argument| match argument {
        Meta::NameValue(meta) if KEYS.iter().any(|key| meta.path.is_ident(key)) => {
            let path = read_string_literal(&meta.value)?;
            // `with` names a module with the functions `serialize` and `deserialize`
            let function = if meta.path.is_ident("with") { "::serialize" } else { "" };
            syn::parse_str(&format!("{path}{function}")).ok()
        }
        _ => None,
    });
    paths.collect()
}

/// Returns the value of a string literal, or `None` if the expression is something else.
fn read_string_literal(expression: &syn::Expr) -> Option<String> {
    match expression {
        syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) => Some(text.value()),
        _ => None,
    }
}
