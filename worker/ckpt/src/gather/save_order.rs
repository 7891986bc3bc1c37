//! The order in which `save_pretrained` of transformers writes tensors. A gather uses this order,
//! so that each shard begins at the same tensor as a shard of transformers.
//!
//! Tensors are in the order of modules in the model's code. Models whose fused experts transformers
//! 5 splits are an exception: all tensors are sorted by name, and matrices that were one tensor
//! stay in one shard.
use crate::catalog::{TensorInfo, parse_expert_matrix_name};
use std::{collections::HashMap, ops::Range};

/// The modules of a decoder layer, in the order in which the model's code defines them.
const LAYER_MODULES: [&str; 13] = [
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

/// Splits the name of a tensor into the prefix of its layer, such as `model.layers.3.`, and the
/// rest. Returns `None` if the tensor is in no layer.
fn split_layer_prefix(name: &str) -> Option<(&str, &str)> {
    let number = name.find(".layers.")? + ".layers.".len();
    let end = number + name[number..].find('.')? + 1;
    Some(name.split_at(end))
}

/// Returns the position, in [`LAYER_MODULES`], of the module to which a tensor of a decoder layer
/// belongs. `rest` is the tensor's name after the prefix of its layer.
fn find_module_position(rest: &str) -> Option<usize> {
    LAYER_MODULES.iter().position(|module| rest.starts_with(module))
}

/// Splits the name of an expert's matrix into the prefix before `.experts.`, the expert's number,
/// and a number by which the expert's matrices are sorted. `down_proj` is first, since it precedes
/// `gate_up_proj` alphabetically. Returns `None` for other tensors.
fn parse_expert_matrix_position(name: &str) -> Option<(&str, u64, usize)> {
    let (before, number, matrix) = parse_expert_matrix_name(name)?;
    Some((before, number, (matrix + 1) % 3))
}

/// A number or word of a tensor's name, in a form that sorts `layers.2` before `layers.10`.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum NamePart<'a> {
    Number(u64),
    Word(&'a str, Option<u64>),
}

/// Parses a part of a tensor's name: a number, or a word that may end in a number.
fn parse_name_part(text: &str) -> NamePart<'_> {
    let word = text.trim_end_matches(|c: char| c.is_ascii_digit());
    match text[word.len()..].parse() {
        Ok(number) if word.is_empty() => NamePart::Number(number),
        number => NamePart::Word(word, number.ok()),
    }
}

/// Computes the sort key of a tensor name that gives tensors the order in which transformers writes
/// those of mixture-of-experts models. The key begins with the name of the tensor, or of the fused
/// tensor from which an expert's matrix comes. The position of the matrix and the number of the
/// expert follow.
fn compute_tensor_sort_key(name: &str) -> (Vec<NamePart<'_>>, usize, u64) {
    let (fused, which, number) = match parse_expert_matrix_position(name) {
        Some((before, number, which)) => (before, which, number),
        None => (name, 0, 0),
    };
    let module = |text| if text == "block_sparse_moe" { "mlp" } else { text };
    let mut parts: Vec<NamePart<'_>> = fused.split('.').map(|text| parse_name_part(module(text))).collect();
    if fused.len() < name.len() {
        parts.push(NamePart::Word("experts", None));
    }
    (parts, which, number)
}

/// Sorts tensors in the order in which `save_pretrained` of transformers writes them. In a mixture
/// of experts, sorts all tensors by name. Otherwise sorts the tensors within each layer whose
/// modules are all known, and leaves other tensors in place.
pub(super) fn sort_as_save_pretrained(mut tensors: Vec<TensorInfo>) -> Vec<TensorInfo> {
    if tensors.iter().any(|t| parse_expert_matrix_position(&t.name).is_some()) {
        tensors.sort_by(|a, b| compute_tensor_sort_key(&a.name).cmp(&compute_tensor_sort_key(&b.name)));
        return tensors;
    }
    let mut layers: HashMap<String, Option<usize>> = HashMap::new();
    for (at, tensor) in tensors.iter().enumerate() {
        if let Some((layer, rest)) = split_layer_prefix(&tensor.name) {
            let first = layers.entry(layer.to_owned()).or_insert(Some(at));
            *first = first.filter(|_| find_module_position(rest).is_some());
        }
    }
    let position = |at: usize, name: &str| {
        let known = split_layer_prefix(name)
            .and_then(|(layer, rest)| Some((layers.get(layer).copied()??, find_module_position(rest)?)));
        known.unwrap_or((at, 0))
    };
    let mut positioned: Vec<((usize, usize), TensorInfo)> =
        tensors.into_iter().enumerate().map(|(at, t)| (position(at, &t.name), t)).collect();
    positioned.sort_by_key(|(position, _)| *position);
    positioned.into_iter().map(|(_, t)| t).collect()
}

/// Groups tensors that must be in one exported file, such as the down projections of all experts of
/// a layer, and returns the index range of each group. The experts' matrices of a layer form three
/// ranges, for down, gate and up. Every other tensor is a range by itself.
pub(super) fn group_inseparable_tensors(tensors: &[TensorInfo]) -> Vec<Range<usize>> {
    let fused = |t: &TensorInfo| {
        parse_expert_matrix_position(&t.name).map(|(before, _, which)| (before.to_owned(), which))
    };
    let mut units: Vec<Range<usize>> = Vec::with_capacity(tensors.len());
    let mut last = None;
    for (at, tensor) in tensors.iter().enumerate() {
        let source = fused(tensor);
        match units.last_mut() {
            Some(unit) if source.is_some() && source == last => unit.end = at + 1,
            _ => units.push(at..at + 1),
        }
        last = source;
    }
    units
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{Dtype, TensorRole};

    fn make_tensor(name: &&str) -> TensorInfo {
        TensorInfo { name: (*name).into(), dtype: Dtype::F32, shape: vec![1], role: TensorRole::Weight }
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
            let found: Vec<String> = sort_as_save_pretrained(names.iter().map(make_tensor).collect())
                .into_iter()
                .map(|t| t.name)
                .collect();
            assert_eq!(found, sorted);
        }
    }

    #[test]
    fn only_layers_with_known_modules_are_sorted() {
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
        let sorted = sort_as_save_pretrained(names.iter().map(make_tensor).collect());
        let order: Vec<usize> =
            sorted.iter().map(|t| names.iter().position(|n| *n == t.name).expect("one of them")).collect();
        assert_eq!(order, [0, 2, 4, 3, 5, 1, 6, 7, 8, 9, 10]);
    }

    #[test]
    fn matrices_of_a_fused_tensor_stay_in_one_shard() {
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
        let tensors: Vec<TensorInfo> = names.iter().map(make_tensor).collect();
        assert_eq!(group_inseparable_tensors(&tensors), [0..1, 1..3, 3..5, 5..6, 6..7, 7..8]);
    }
}
