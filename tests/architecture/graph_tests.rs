//! Tests of the module graph on small crates.
use super::{
    crate_modules::read_crate,
    module_graph::{ExternalUse, ModuleGraph},
};
use std::{collections::BTreeMap, path::Path};

/// Builds the graph of a crate from the paths and texts of its files. The first file is the root.
/// Panics if a file is missing or not valid, or if a path does not resolve.
pub(crate) fn build_graph(files: &[(&str, &str)]) -> ModuleGraph {
    let graph = build_unchecked_graph(files);
    assert!(graph.unresolved_paths.is_empty(), "{:?}", graph.unresolved_paths);
    graph
}

fn build_unchecked_graph(files: &[(&str, &str)]) -> ModuleGraph {
    let texts: BTreeMap<&Path, &str> = files.iter().map(|(path, text)| (Path::new(*path), *text)).collect();
    let read_file = |path: &Path| texts.get(path).map(|text| (*text).to_owned());
    ModuleGraph::new(read_crate(Path::new(files[0].0), &read_file).unwrap_or_else(|e| panic!("{e}")))
}

fn list_edges(files: &[(&str, &str)]) -> Vec<String> {
    let graph = build_graph(files);
    let mut edges: Vec<_> = graph.edges.keys().map(|(from, to)| graph.format_edge(*from, *to)).collect();
    edges.sort();
    edges
}

fn list_cycles(files: &[(&str, &str)]) -> Vec<String> {
    let graph = build_graph(files);
    graph.find_cycles().iter().map(|cycle| graph.format_cycle(cycle)).collect()
}

#[test]
fn a_declaration_is_no_edge_and_an_import_is_one() {
    let files = [
        ("lib.rs", "mod a; mod b; mod c;"),
        (
            "a.rs",
            "use super::b::B; use crate::c; fn f(_: B, _: c::C<B>) -> self::G { c::make::<B>() } type G = c::D;",
        ),
        ("b.rs", "pub struct B;"),
        ("c.rs", "pub struct C<T>(T); pub struct D; pub fn make<T>() -> D { D }"),
    ];
    assert_eq!(list_edges(&files), ["a.rs -> b.rs: B", "a.rs -> c.rs: C, D, make"]);
    assert!(list_cycles(&files).is_empty());
}

#[test]
fn a_cycle_is_shown_with_the_edge_that_closes_it() {
    let files = [
        ("lib.rs", "mod a; mod b; mod c; mod d;"),
        ("a.rs", "use crate::b::{B, make_b}; pub struct A;"),
        ("b.rs", "use crate::c::{C, make_c}; pub struct B; pub fn make_b() {}"),
        ("c.rs", "use crate::{a::A, d::D}; pub struct C; pub fn make_c() {}"),
        ("d.rs", "pub struct D;"),
    ];
    let expected = "a cycle of 3 files: a.rs b.rs c.rs\n  c.rs -> a.rs: A\n    and a.rs -> b.rs: B, make_b\n    \
                    and b.rs -> c.rs: C, make_c\n";
    assert_eq!(list_cycles(&files), [expected]);
}

#[test]
fn every_cycle_of_a_component_has_a_closing_edge() {
    let files = [
        ("lib.rs", "mod a; mod b; mod c; mod d; mod e;"),
        ("a.rs", "use crate::b::{B, X}; pub struct A;"),
        ("b.rs", "use crate::{a::A, c::{C, Y}}; pub struct B; pub struct X;"),
        ("c.rs", "use crate::a::A; pub struct C; pub struct Y;"),
        ("d.rs", "use crate::e::E; pub struct D;"),
        ("e.rs", "use crate::d::D; pub struct E;"),
    ];
    let graph = build_graph(&files);
    let cycles = graph.find_cycles();
    let closing = |at: usize| -> Vec<String> {
        cycles[at].closing_edges.iter().map(|(from, to)| graph.format_edge(*from, *to)).collect()
    };
    assert_eq!(closing(0), ["b.rs -> a.rs: A", "c.rs -> a.rs: A"]);
    assert_eq!(closing(1), ["e.rs -> d.rs: D"]);
    assert_eq!(cycles.len(), 2);
}

#[test]
fn reexports_lead_to_the_definition() {
    let files = [
        ("lib.rs", "mod a; mod facade; pub use facade::Renamed;"),
        (
            "a.rs",
            "use crate::{facade::B, Renamed}; use crate::facade::inner::deep::{self, V}; pub struct A; type T = deep::V;",
        ),
        ("facade.rs", "pub mod inner; pub use inner::{B, C as Renamed};"),
        ("facade/inner.rs", "pub struct B; pub use deep::C; pub mod deep;"),
        ("facade/inner/deep.rs", "use crate::a::A; pub struct C; pub struct V;"),
    ];
    let expected = [
        "a.rs -> facade/inner.rs: B",
        "a.rs -> facade/inner/deep.rs: C, V",
        "facade.rs -> facade/inner.rs: B",
        "facade.rs -> facade/inner/deep.rs: C",
        "facade/inner.rs -> facade/inner/deep.rs: C",
        "facade/inner/deep.rs -> a.rs: A",
        "lib.rs -> facade/inner/deep.rs: C",
    ];
    assert_eq!(list_edges(&files), expected);
    let cycle = "a cycle of 3 files: a.rs facade/inner.rs facade/inner/deep.rs\n  \
                 facade/inner/deep.rs -> a.rs: A\n    and a.rs -> facade/inner/deep.rs: C, V\n";
    assert_eq!(list_cycles(&files), [cycle]);
}

#[test]
fn glob_imports_give_edges_to_the_names_that_are_used() {
    let files = [
        ("lib.rs", "mod a; mod b; mod c; pub use b::*; pub use c::*;"),
        ("a.rs", "mod child; const LIMIT: usize = 1; use crate::b::B; fn help() {}"),
        ("a/child.rs", "use super::*; fn f(_: B) -> usize { help(); LIMIT + crate::shared() }"),
        ("b.rs", "pub struct B; fn shared() {} pub use crate::c::*;"),
        ("c.rs", "pub fn shared() -> usize { 1 } pub use crate::b::*;"),
    ];
    let expected = [
        "a.rs -> b.rs: B",
        "a/child.rs -> a.rs: LIMIT, help",
        "a/child.rs -> b.rs: B",
        "a/child.rs -> c.rs: shared",
    ];
    assert_eq!(list_edges(&files), expected);
}

#[test]
fn tokens_of_macros_and_attributes_are_searched() {
    let files = [
        ("lib.rs", "mod a; mod b;"),
        (
            "a.rs",
            "use crate::b;
             fn f(x: b::Format) { println!(\"{}\", b::value()); assert!(matches!(x, b::Format::Long(_)), \"b::Text\"); }
             const LIST: &[usize] = &vec![super::b::LIMIT; 0..crate::b::END];
             #[derive(Serialize)] struct S { #[serde(with = \"crate::b::hex\", rename = \"b::Name\")] x: u8, #[arg(value_parser = b::parse)] y: u8 }
             fn g(b: S) { println!(\"{}\", b.value, b.b::<T>::value); }",
        ),
        (
            "b.rs",
            "pub enum Format { Long(u8) } pub fn value() {} pub const LIMIT: usize = 1; pub const END: usize = 1;
             pub fn parse() {} pub struct Text; pub struct Name; pub enum T {} pub mod hex { pub fn serialize() {} }",
        ),
    ];
    assert_eq!(list_edges(&files), ["a.rs -> b.rs: END, Format, LIMIT, parse, serialize, value"]);
}

#[test]
fn test_code_is_ignored() {
    let files = [
        (
            "lib.rs",
            "mod a; mod b; #[cfg(test)] mod tests; #[cfg(all(test, unix))] mod more_tests; #[cfg(any(test))] use b::N;",
        ),
        (
            "a.rs",
            "#[cfg(test)] use crate::b::B; #[cfg(not(test))] use crate::b::C; #[cfg(any(test, unix))] use crate::b::D;
             struct S { #[cfg(test)] x: crate::b::E }
             impl S { #[cfg(test)] fn t() { crate::b::f() } fn u() { #[cfg(test)] let _ = crate::b::g(); } }
             #[cfg(test)] mod tests { use super::*; use crate::b::h; }",
        ),
        (
            "b.rs",
            "pub struct B; pub struct C; pub struct D; pub struct E; pub struct N; pub fn f() {} pub fn g() {} pub fn h() {}",
        ),
    ];
    assert_eq!(list_edges(&files), ["a.rs -> b.rs: C, D"]);
}

#[test]
fn inline_modules_belong_to_their_file() {
    let files = [
        (
            "lib.rs",
            "mod a { pub mod b; pub mod c { pub struct C; #[path = \"odd.rs\"] pub mod d; } } mod e; #[path = \"x/f.rs\"] mod f;",
        ),
        ("a/b.rs", "use super::c::{C, d::D};"),
        ("a/c/odd.rs", "pub struct D; fn f(_: super::C, _: super::super::b::Hidden) {}"),
        ("e/mod.rs", "mod g; pub struct E; mod inner { use super::E; use super::super::f::F; }"),
        ("e/g.rs", "use super::E;"),
        ("x/f.rs", "mod h; pub struct F;"),
        ("x/h.rs", "use super::F;"),
    ];
    let mut files = files.to_vec();
    files[1].1 = "use super::c::{C, d::D}; pub(super) struct Hidden;";
    let expected = [
        "a/b.rs -> a/c/odd.rs: D",
        "a/b.rs -> lib.rs: C",
        "a/c/odd.rs -> a/b.rs: Hidden",
        "a/c/odd.rs -> lib.rs: C",
        "e/g.rs -> e/mod.rs: E",
        "e/mod.rs -> x/f.rs: F",
        "x/h.rs -> x/f.rs: F",
    ];
    assert_eq!(list_edges(&files), expected);
    let graph = build_graph(&files);
    let top_level: Vec<_> = graph.files.iter().map(|file| file.top_level_module.as_deref()).collect();
    assert_eq!(top_level[..4], [None, Some("a"), Some("a"), Some("e")]);
    assert_eq!(graph.top_level_modules, ["a", "e", "f"].map(str::to_owned).into());
}

#[test]
fn macros_are_items() {
    let files = [
        ("lib.rs", "mod a; mod b; mod c;"),
        (
            "a.rs",
            "macro_rules! in_scope { () => { $crate::b::helper() } } mod child; codes! { LIST = 1 } fn f() { crate::exported!() }",
        ),
        ("a/child.rs", "use crate::b::shared; fn f() { in_scope!(); shared!(x); }"),
        (
            "b.rs",
            "macro_rules! shared { ($b:ident) => { $b::helper() } } pub(crate) use shared; pub fn helper() {}
             #[macro_export] macro_rules! exported { () => {} }",
        ),
        ("c.rs", "use crate::a::LIST;"),
    ];
    let expected = [
        "a.rs -> b.rs: exported, helper",
        "a/child.rs -> a.rs: in_scope",
        "a/child.rs -> b.rs: shared",
        "c.rs -> a.rs: LIST",
    ];
    assert_eq!(list_edges(&files), expected);
}

#[test]
fn associated_items_and_variants_belong_to_their_type() {
    let files = [
        ("lib.rs", "mod a; mod b; mod c;"),
        (
            "a.rs",
            "use crate::b::Kind::{self, Small}; use crate::c::shape;
             impl crate::b::Size { pub fn grow(&self) {} }
             fn f(k: Kind) { use crate::b::Other::*; match k { Small => {}, Kind::Big { .. } => {}, _ => crate::b::Size::grow(&Max) } }
             fn g() { fn shape() {} shape(); <u8 as crate::c::Measure>::measure(&1); use super::c as alias; alias::limit() }
             fn h() { shape::draw() }",
        ),
        ("b.rs", "pub enum Kind { Small, Big {} } pub struct Size; pub enum Other { Max }"),
        ("c.rs", "pub mod shape; pub trait Measure { fn measure(&self); } pub fn limit() {}"),
        ("c/shape.rs", "pub fn draw() {}"),
    ];
    let expected =
        ["a.rs -> b.rs: Kind, Other, Size", "a.rs -> c.rs: Measure, limit", "a.rs -> c/shape.rs: draw"];
    assert_eq!(list_edges(&files), expected);
}

#[test]
fn a_function_can_have_the_name_of_a_module() {
    let files = [
        ("lib.rs", "mod a; mod b;"),
        ("a.rs", "use crate::b::plan; fn f() { plan(); plan::run(); let _ = plan::Plan::new(); }"),
        ("b.rs", "pub mod plan; pub fn plan() {}"),
        ("b/plan.rs", "pub struct Plan; pub fn run() {}"),
    ];
    assert_eq!(list_edges(&files), ["a.rs -> b.rs: plan", "a.rs -> b/plan.rs: Plan, run"]);
}

#[test]
fn paths_that_lead_nowhere_are_reported() {
    let files = [
        (
            "lib.rs",
            "mod a;\nfn f() { a::missing(); Vec::new(); T::new(); std::fs::read() }\nuse a::{Hidden, Shown};",
        ),
        ("a.rs", "pub struct Shown; struct Hidden;"),
    ];
    let graph = build_unchecked_graph(&files);
    assert_eq!(graph.unresolved_paths, ["lib.rs:2: a::missing", "lib.rs:3: a::Hidden"]);
    let read_file =
        |path: &Path| (path == Path::new("lib.rs")).then(|| "mod a { mod b; }\nmod c;".to_owned());
    let error = read_crate(Path::new("lib.rs"), &read_file).err();
    let expected = "a/b.rs: the file does not exist\nc.rs: the file does not exist";
    assert_eq!(error.as_deref(), Some(expected));
}

#[test]
fn items_of_other_crates_are_named_by_their_full_path() {
    let files = [
        ("lib.rs", "mod a; pub use std::sync::mpsc as queue;"),
        (
            "a.rs",
            "use crate::queue::channel;\nuse std::{fs::{self, File}, time::Instant};\nuse tokio::net::*;\n\
             fn f() { fs::read(); }\nfn g() { Instant::now(); ::libc::fork(); }\nfn h() { println!(\"{}\", fs::write()); bind(); }",
        ),
    ];
    let graph = build_graph(&files);
    let find = |line: usize| -> Vec<&str> {
        let in_line = |u: &&ExternalUse| u.file == "a.rs" && u.line == line;
        graph.external_uses.iter().filter(in_line).map(|u| u.item.as_str()).collect()
    };
    assert_eq!(find(1), ["std::sync::mpsc::channel"]);
    assert_eq!(find(2), ["std::fs", "std::fs::File", "std::time::Instant"]);
    assert_eq!(find(4), ["std::fs::read"]);
    assert_eq!(find(5), ["std::time::Instant::now", "libc::fork"]);
    assert_eq!(find(6), ["tokio::net::println", "std::fs::write", "tokio::net::bind"]);
}
