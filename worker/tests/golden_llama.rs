//! Logits, loss, every gradient and ten AdamW steps against real transformers and torch (tests/golden/llama/README.md).
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod common;
use common::{
    golden,
    llama::{load, with_golden_weights},
};

fn check(name: &str) {
    golden::check(&load(name), with_golden_weights);
}

#[test]
fn multi_head_untied() {
    check("mha");
}

#[test]
fn grouped_query_tied() {
    check("gqa_tied");
}

#[test]
fn sizes_that_nothing_divides() {
    check("odd");
}

#[test]
fn packed_documents() {
    check("packed");
}
