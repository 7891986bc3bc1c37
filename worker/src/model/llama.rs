//! Llama 1 to 3: biases where `attention_bias` and `mlp_bias` say so.
use super::{Family, config::Fields, decoder};
use serde_json::json;

pub(super) const FAMILY: Family = Family {
    name: "llama",
    architecture: "LlamaForCausalLM",
    build: |config, tokens| {
        let f = Fields::new(config);
        let mut n = decoder::Numbers::read(&f)?;
        let bias = f.flag("attention_bias")?;
        (n.qkv_bias, n.o_bias, n.mlp_bias) = (bias, bias, f.flag("mlp_bias")?);
        f.only("rope_interleaved", &[json!(false)])?;
        f.only("is_llama_config", &[json!(true)])?;
        f.finish()?;
        Ok(decoder::build(n, config, tokens))
    },
    describe: |spec| {
        let own = json!({"attention_bias": false, "mlp_bias": false});
        decoder::describe(spec, "llama", "LlamaForCausalLM", own)
    },
    dropout: &[decoder::DROPOUT],
};
