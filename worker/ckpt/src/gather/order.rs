//! The order in which `save_pretrained` writes tensors. With it shards are cut at the same places.
//!
//! It is that of the modules in the model's code; but where it takes fused experts apart, as transformers 5 does, it sorts
//! all tensors by name first, and what was one tensor stays in one shard.
use crate::catalog::TensorInfo;
use std::{collections::HashMap, ops::Range};

/// Modules of a decoder layer, in order.
const MODULES: [&str; 13] = [
    "self_attn.q_proj.",
    "self_attn.k_proj.",
    "self_attn.v_proj.",
    "self_attn.o_proj.",
    "self_attn.q_norm.",
    "self_attn.k_norm.",
    "mlp.gate_proj.",
    "mlp.up_proj.",
    "mlp.down_proj.",
    "input_layernorm.",
    "post_attention_layernorm.",
    "pre_feedforward_layernorm.",
    "post_feedforward_layernorm.",
];

/// The layer's prefix (`model.layers.3.`) and the rest of the name.
fn cut(name: &str) -> Option<(&str, &str)> {
    let number = name.find(".layers.")? + ".layers.".len();
    let end = number + name[number..].find('.')? + 1;
    Some(name.split_at(end))
}

fn rank(rest: &str) -> Option<usize> {
    MODULES.iter().position(|module| rest.starts_with(module))
}

/// The matrices of an expert in the order in which they are taken apart, by the names of the families: down is an
/// alphabet before gate and up, which are one tensor.
const EXPERT: [[&str; 2]; 3] = [["down_proj", "w2"], ["gate_proj", "w1"], ["up_proj", "w3"]];

/// Of a matrix of an expert: what stands before the expert's number, the number, which matrix.
fn of_expert(name: &str) -> Option<(&str, u64, usize)> {
    let (before, rest) = name.split_once(".experts.")?;
    let [number, matrix, "weight"] = rest.split('.').collect::<Vec<_>>()[..] else { return None };
    let which = EXPERT.iter().position(|names| names.contains(&matrix))?;
    Some((before, number.parse().ok()?, which))
}

/// A part of a name between two dots; numbers by their value, also at the end of a word.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Part<'a> {
    Number(u64),
    Word(&'a str, Option<u64>),
}

fn part(text: &str) -> Part<'_> {
    let word = text.trim_end_matches(|c: char| c.is_ascii_digit());
    match text[word.len()..].parse() {
        Ok(number) if word.is_empty() => Part::Number(number),
        number => Part::Word(word, number.ok()),
    }
}

/// By the name that the tensor, or the fused one that it is a part of, has in the model's code.
fn by_name(name: &str) -> (Vec<Part<'_>>, usize, u64) {
    let (fused, which, number) = match of_expert(name) {
        Some((before, number, which)) => (before, which, number),
        None => (name, 0, 0),
    };
    let module = |text| if text == "block_sparse_moe" { "mlp" } else { text };
    let mut parts: Vec<Part<'_>> = fused.split('.').map(|text| part(module(text))).collect();
    if fused.len() < name.len() {
        parts.push(Part::Word("experts", None));
    }
    (parts, which, number)
}

/// Brings the tensors of each layer whose modules are all known into their order, at the place of its first tensor;
/// all others stay where they are. Of a mixture of experts all are sorted by name.
pub(super) fn sort(mut tensors: Vec<TensorInfo>) -> Vec<TensorInfo> {
    if tensors.iter().any(|t| of_expert(&t.name).is_some()) {
        tensors.sort_by(|a, b| by_name(&a.name).cmp(&by_name(&b.name)));
        return tensors;
    }
    let mut layers: HashMap<String, Option<usize>> = HashMap::new();
    for (at, tensor) in tensors.iter().enumerate() {
        if let Some((layer, rest)) = cut(&tensor.name) {
            let first = layers.entry(layer.to_owned()).or_insert(Some(at));
            *first = first.filter(|_| rank(rest).is_some());
        }
    }
    let place = |at: usize, name: &str| {
        let known = cut(name).and_then(|(layer, rest)| Some((layers.get(layer).copied()??, rank(rest)?)));
        known.unwrap_or((at, 0))
    };
    let mut placed: Vec<((usize, usize), TensorInfo)> =
        tensors.into_iter().enumerate().map(|(at, t)| (place(at, &t.name), t)).collect();
    placed.sort_by_key(|(place, _)| *place);
    placed.into_iter().map(|(_, t)| t).collect()
}

/// Ranges of sorted tensors that come into one shard: the matrices of a layer's experts are views of three tensors, of down,
/// gate and up; every other tensor is by itself.
pub(super) fn units(tensors: &[TensorInfo]) -> Vec<Range<usize>> {
    let fused = |t: &TensorInfo| of_expert(&t.name).map(|(before, _, which)| (before.to_owned(), which));
    let mut units: Vec<Range<usize>> = Vec::with_capacity(tensors.len());
    let mut last = None;
    for (at, tensor) in tensors.iter().enumerate() {
        let own = fused(tensor);
        match units.last_mut() {
            Some(unit) if own.is_some() && own == last => unit.end = at + 1,
            _ => units.push(at..at + 1),
        }
        last = own;
    }
    units
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{catalog::Role, dtype::Dtype};

    fn tensor(name: &&str) -> TensorInfo {
        TensorInfo { name: (*name).into(), dtype: Dtype::F32, shape: vec![1], role: Role::Weight }
    }

    #[test]
    fn mixtures_are_sorted_by_name_matrix_and_expert() {
        let sorted = [
            "lm_head.weight",
            "model.embed_tokens.weight",
            "model.layers.2.input_layernorm.weight",
            "model.layers.2.block_sparse_moe.experts.2.w2.weight",
            "model.layers.2.block_sparse_moe.experts.10.w2.weight",
            "model.layers.2.block_sparse_moe.experts.2.w1.weight",
            "model.layers.2.block_sparse_moe.experts.2.w3.weight",
            "model.layers.2.block_sparse_moe.experts.10.w3.weight",
            "model.layers.2.block_sparse_moe.gate.weight",
            "model.layers.2.post_attention_layernorm.weight",
            "model.layers.2.self_attn.k_proj.weight",
            "model.layers.10.input_layernorm.weight",
            "model.norm.weight",
        ];
        for turn in 0..sorted.len() {
            let mut names = sorted;
            names.rotate_left(turn);
            names.swap(0, 5);
            let found: Vec<String> =
                sort(names.iter().map(tensor).collect()).into_iter().map(|t| t.name).collect();
            assert_eq!(found, sorted);
        }
    }

    #[test]
    fn layers_with_known_modules_are_sorted_in_place() {
        let names = [
            "model.embed_tokens.weight",
            "model.layers.0.input_layernorm.weight",
            "model.layers.0.self_attn.q_proj.weight",
            "model.layers.0.self_attn.k_proj.weight",
            "model.layers.0.self_attn.q_proj.bias",
            "model.layers.0.mlp.down_proj.weight",
            "model.layers.1.input_layernorm.weight",
            "model.layers.1.mystery.weight",
            "model.layers.1.self_attn.q_proj.weight",
            "transformer.h.0.ln_1.weight",
            "model.norm.weight",
        ];
        let sorted = sort(names.iter().map(tensor).collect());
        let order: Vec<usize> =
            sorted.iter().map(|t| names.iter().position(|n| *n == t.name).expect("one of them")).collect();
        assert_eq!(order, [0, 2, 4, 3, 5, 1, 6, 7, 8, 9, 10]);
    }

    #[test]
    fn what_was_fused_stays_together() {
        let names = [
            "model.embed_tokens.weight",
            "model.layers.0.mlp.experts.0.down_proj.weight",
            "model.layers.0.mlp.experts.1.down_proj.weight",
            "model.layers.0.mlp.experts.0.gate_proj.weight",
            "model.layers.0.mlp.experts.1.gate_proj.weight",
            "model.layers.0.mlp.experts.0.up_proj.weight",
            "model.layers.0.mlp.gate.weight",
            "model.norm.weight",
        ];
        let tensors: Vec<TensorInfo> = names.iter().map(tensor).collect();
        assert_eq!(units(&tensors), [0..1, 1..3, 3..5, 5..6, 6..7, 7..8]);
    }
}
