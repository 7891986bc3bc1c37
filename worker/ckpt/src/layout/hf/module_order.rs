//! The order in which models of known families register their parameters, which is the order of the
//! parameters in a torch optimizer. Files of weights are sorted by name, while optimizers number
//! parameters in the order of registration.
//!
//! A test compares the orders with the models of transformers (scripts/golden/orders.py). Names may
//! match several families, since Mixtral registers the gate before the experts, and Qwen3-MoE after
//! the experts. The shapes of the optimizer states then decide.
use std::collections::HashMap;

/// The modules of each model family, in the order in which models register them. `*` stands for a
/// number. The name of a parameter is the name of a module, optionally with `.weight` or `.bias`.
/// Modules that a model lacks are skipped.
const FAMILY_MODULES: &[&[&str]] = &[
    // Llama, Mistral, Qwen2, Qwen3, Gemma, Phi-3, Mixtral and similar
    &[
        "model.embed_tokens",
        "model.layers.*.self_attn.q_proj",
        "model.layers.*.self_attn.k_proj",
        "model.layers.*.self_attn.v_proj",
        "model.layers.*.self_attn.o_proj",
        "model.layers.*.self_attn.qkv_proj",
        "model.layers.*.self_attn.q_norm",
        "model.layers.*.self_attn.k_norm",
        "model.layers.*.block_sparse_moe.gate",
        "model.layers.*.block_sparse_moe.experts.*.w1",
        "model.layers.*.block_sparse_moe.experts.*.w2",
        "model.layers.*.block_sparse_moe.experts.*.w3",
        "model.layers.*.mlp.gate",
        "model.layers.*.mlp.experts.gate_up_proj",
        "model.layers.*.mlp.experts.down_proj",
        "model.layers.*.mlp.gate_proj",
        "model.layers.*.mlp.up_proj",
        "model.layers.*.mlp.gate_up_proj",
        "model.layers.*.mlp.down_proj",
        "model.layers.*.input_layernorm",
        "model.layers.*.post_attention_layernorm",
        "model.layers.*.pre_feedforward_layernorm",
        "model.layers.*.post_feedforward_layernorm",
        "model.norm",
        "lm_head",
        "score",
    ],
    // Qwen3-MoE
    &[
        "model.embed_tokens",
        "model.layers.*.self_attn.q_proj",
        "model.layers.*.self_attn.k_proj",
        "model.layers.*.self_attn.v_proj",
        "model.layers.*.self_attn.o_proj",
        "model.layers.*.self_attn.q_norm",
        "model.layers.*.self_attn.k_norm",
        "model.layers.*.mlp.experts.gate_up_proj",
        "model.layers.*.mlp.experts.down_proj",
        "model.layers.*.mlp.gate",
        "model.layers.*.mlp.gate_proj",
        "model.layers.*.mlp.up_proj",
        "model.layers.*.mlp.down_proj",
        "model.layers.*.input_layernorm",
        "model.layers.*.post_attention_layernorm",
        "model.norm",
        "lm_head",
    ],
    // GPT-2
    &[
        "transformer.wte",
        "transformer.wpe",
        "transformer.h.*.ln_1",
        "transformer.h.*.attn.c_attn",
        "transformer.h.*.attn.c_proj",
        "transformer.h.*.ln_2",
        "transformer.h.*.mlp.c_fc",
        "transformer.h.*.mlp.c_proj",
        "transformer.ln_f",
        "lm_head",
        "score",
    ],
    // GPT-NeoX, Pythia
    &[
        "gpt_neox.embed_in",
        "gpt_neox.layers.*.input_layernorm",
        "gpt_neox.layers.*.post_attention_layernorm",
        "gpt_neox.layers.*.attention.query_key_value",
        "gpt_neox.layers.*.attention.dense",
        "gpt_neox.layers.*.mlp.dense_h_to_4h",
        "gpt_neox.layers.*.mlp.dense_4h_to_h",
        "gpt_neox.final_layer_norm",
        "embed_out",
        "lm_head",
    ],
    // OPT
    &[
        "model.decoder.embed_tokens",
        "model.decoder.embed_positions",
        "model.decoder.project_out",
        "model.decoder.project_in",
        "model.decoder.final_layer_norm",
        "model.decoder.layers.*.self_attn.k_proj",
        "model.decoder.layers.*.self_attn.v_proj",
        "model.decoder.layers.*.self_attn.q_proj",
        "model.decoder.layers.*.self_attn.out_proj",
        "model.decoder.layers.*.self_attn_layer_norm",
        "model.decoder.layers.*.fc1",
        "model.decoder.layers.*.fc2",
        "model.decoder.layers.*.final_layer_norm",
        "lm_head",
    ],
    // BERT
    &[
        "bert.embeddings.word_embeddings",
        "bert.embeddings.position_embeddings",
        "bert.embeddings.token_type_embeddings",
        "bert.embeddings.LayerNorm",
        "bert.encoder.layer.*.attention.self.query",
        "bert.encoder.layer.*.attention.self.key",
        "bert.encoder.layer.*.attention.self.value",
        "bert.encoder.layer.*.attention.output.dense",
        "bert.encoder.layer.*.attention.output.LayerNorm",
        "bert.encoder.layer.*.intermediate.dense",
        "bert.encoder.layer.*.output.dense",
        "bert.encoder.layer.*.output.LayerNorm",
        "bert.pooler.dense",
        "classifier",
    ],
];

/// Returns the parameter names `names` in the order in which the model registers its parameters,
/// once for each model family to which the names may belong. Returns one list per distinct order,
/// and no list if no family matches.
pub(crate) fn sort_in_registration_orders<'a>(names: &[&'a str]) -> Vec<Vec<&'a str>> {
    let mut orders: Vec<Vec<&str>> = Vec::new();
    for positions in FAMILY_MODULES.iter().map(|family| ModulePositions::new(family)) {
        let keyed: Option<Vec<(RegistrationKey, &str)>> =
            names.iter().map(|n| Some((positions.compute_sort_key(n)?, *n))).collect();
        let Some(mut keyed) = keyed else { continue };
        keyed.sort_unstable();
        let order = keyed.into_iter().map(|(_, name)| name).collect();
        if !orders.contains(&order) {
            orders.push(order);
        }
    }
    orders
}

/// A sort key that orders a model's parameters in the way in which the model registers them.
type RegistrationKey = [u64; 6];

/// A map from the modules of one model family to the order in which the model registers them.
struct ModulePositions {
    /// Maps the name of each module, with `*` in place of numbers, to its position.
    modules: HashMap<&'static str, u64>,
    /// Maps the part of a module's name before each `*` to the position of the first module whose
    /// name begins with this part.
    stems: HashMap<&'static str, u64>,
}

impl ModulePositions {
    /// Creates the map from a model family's modules to their positions in the order in which
    /// models of this family register them.
    fn new(family: &'static [&'static str]) -> ModulePositions {
        let mut positions = ModulePositions { modules: HashMap::new(), stems: HashMap::new() };
        for (i, module) in (0u64..).zip(family) {
            positions.modules.insert(module, i);
            for (at, _) in module.match_indices('*') {
                positions.stems.entry(&module[..at]).or_insert(i);
            }
        }
        positions
    }

    /// Returns a sort key for the parameter `name` that reflects the order in which models of this
    /// family register their parameters. Returns `None` if the family does not have the parameter's
    /// module.
    fn compute_sort_key(&self, name: &str) -> Option<RegistrationKey> {
        let (module, last) = match name.rsplit_once('.') {
            Some((module, "weight")) => (module, 0),
            Some((module, "bias")) => (module, 1),
            _ => (name, 0),
        };
        let (mut pattern, mut numbers) = (String::new(), Vec::new());
        for part in module.split('.') {
            if !pattern.is_empty() {
                pattern.push('.');
            }
            match part.parse::<u64>() {
                Ok(number) => {
                    numbers.push((*self.stems.get(pattern.as_str())?, number));
                    pattern.push('*');
                }
                Err(_) => pattern.push_str(part),
            }
        }
        let position = *self.modules.get(pattern.as_str())?;
        let level = |i: usize| numbers.get(i).copied().unwrap_or((position, 0));
        let ((a, b), (c, d)) = (level(0), level(1));
        Some([a, b, c, d, position, last])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_sorted_by_number_and_modules_by_registration() {
        let sorted = [
            "lm_head.weight",
            "model.layers.10.input_layernorm.weight",
            "model.layers.2.input_layernorm.weight",
            "model.layers.2.block_sparse_moe.experts.1.w1.weight",
            "model.layers.2.block_sparse_moe.experts.0.w2.weight",
            "model.layers.2.self_attn.q_proj.bias",
            "model.layers.2.self_attn.q_proj.weight",
            "model.embed_tokens.weight",
        ];
        let expected = [
            "model.embed_tokens.weight",
            "model.layers.2.self_attn.q_proj.weight",
            "model.layers.2.self_attn.q_proj.bias",
            "model.layers.2.block_sparse_moe.experts.0.w2.weight",
            "model.layers.2.block_sparse_moe.experts.1.w1.weight",
            "model.layers.2.input_layernorm.weight",
            "model.layers.10.input_layernorm.weight",
            "lm_head.weight",
        ];
        assert_eq!(sort_in_registration_orders(&sorted), [expected]);
        assert!(sort_in_registration_orders(&["model.embed_tokens.weight", "mine.weight"]).is_empty());
    }

    /// Checks for a model of every family that the registration order equals that of transformers.
    /// If the names match two families, one of the two orders must equal the order of transformers.
    #[test]
    fn registration_orders_equal_those_of_transformers() {
        let golden: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(include_str!("../../../tests/golden/orders.json")).expect("JSON");
        let models: Vec<_> = golden.iter().filter(|(name, _)| *name != "transformers").collect();
        assert_eq!(models.len(), 15);
        for (model, weights) in models {
            let names = weights.as_array().expect("a list").iter().map(|w| w[0].as_str().expect("a name"));
            let expected: Vec<&str> = names.collect();
            let mut sorted = expected.clone();
            sorted.sort_unstable();
            let orders = sort_in_registration_orders(&sorted);
            assert!(orders.contains(&expected), "{model}: {orders:?}");
            let experts = expected.iter().any(|n| n.contains("experts"));
            assert!(orders.len() == 1 || (experts && orders.len() == 2), "{model}: {orders:?}");
        }
    }
}
