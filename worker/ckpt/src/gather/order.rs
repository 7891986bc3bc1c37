//! The order in which `save_pretrained` writes tensors: that of the modules in the model's code. With it shards are cut
//! at the same places.
use crate::catalog::TensorInfo;
use std::collections::HashMap;

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

/// Brings the tensors of each layer whose modules are all known into their order, at the place of its first tensor;
/// all others stay where they are.
pub(super) fn sort(tensors: Vec<TensorInfo>) -> Vec<TensorInfo> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{catalog::Role, dtype::Dtype};

    #[test]
    fn layers_with_known_modules_are_sorted_in_place() {
        let tensor = |name: &&str| TensorInfo {
            name: (*name).into(),
            dtype: Dtype::F32,
            shape: vec![1],
            role: Role::Weight,
        };
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
}
