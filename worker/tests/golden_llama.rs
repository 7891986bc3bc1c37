//! Llama compared with transformers and PyTorch: logits, loss, every gradient and ten AdamW steps
//! (tests/golden/llama/README.md).
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod common;
use common::{
    golden,
    llama::{load_case, start_with_golden_weights},
};

/// Compares our results with the golden answers of a case.
fn check(name: &str) {
    golden::check_case(&load_case(name), start_with_golden_weights);
}

#[test]
fn multi_head_attention_with_separate_embeddings_matches_pytorch() {
    check("mha");
}

#[test]
fn grouped_query_attention_with_tied_embeddings_matches_pytorch() {
    check("gqa_tied");
}

#[test]
fn odd_sizes_match_pytorch() {
    check("odd");
}

#[test]
fn packed_documents_match_pytorch() {
    check("packed");
}
