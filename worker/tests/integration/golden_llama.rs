//! Compares Llama with transformers and PyTorch: logits, loss, every gradient and ten AdamW steps
//! (tests/golden/llama/README.md).
use crate::common::{
    golden,
    llama::{load_llama_case, start_with_golden_weights},
};

/// Asserts that launch computes the expected values of a golden case.
fn assert_matches_golden_case(name: &str) {
    golden::assert_golden_case(&load_llama_case(name), start_with_golden_weights);
}

#[test]
fn multi_head_attention_with_separate_embeddings_matches_pytorch() {
    assert_matches_golden_case("mha");
}

#[test]
fn grouped_query_attention_with_tied_embeddings_matches_pytorch() {
    assert_matches_golden_case("gqa_tied");
}

#[test]
fn odd_sizes_match_pytorch() {
    assert_matches_golden_case("odd");
}

#[test]
fn packed_documents_match_pytorch() {
    assert_matches_golden_case("packed");
}
