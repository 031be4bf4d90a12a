//! Tokens by published keys, which `openssl` makes here.

use std::io::Write as _;
use std::process::{Command, Stdio};

use axum::http::{HeaderMap, HeaderValue};
use jsonwebtoken::{EncodingKey, Header, encode};
use serde_json::json;

use super::*;
use crate::auth::{AuthRequired, Authenticator, JwtVerifier};

const NOW: i64 = 1_800_000_000;

struct Issuer {
    algorithm: Algorithm,
    kid: &'static str,
    key: EncodingKey,
}

fn openssl(arguments: &[&str], input: &[u8]) -> Vec<u8> {
    let mut command = Command::new("openssl");
    let mut child = command
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("openssl is installed");
    child.stdin.take().expect("a pipe").write_all(input).expect("is read");
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success(), "openssl {arguments:?}");
    output.stdout
}

fn issuer(algorithm: Algorithm, kid: &'static str) -> Issuer {
    let key = match algorithm {
        Algorithm::RS256 => EncodingKey::from_rsa_der(&openssl(&["genrsa", "-traditional", "2048"], &[]).pem()),
        Algorithm::ES256 => {
            let made = openssl(&["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"], &[]);
            EncodingKey::from_ec_der(&made.pem())
        }
        _ => EncodingKey::from_ed_der(&openssl(&["genpkey", "-algorithm", "ed25519", "-outform", "DER"], &[])),
    };
    Issuer { algorithm, kid, key }
}

/// The octets of a PEM file's one block.
trait Pem {
    fn pem(&self) -> Vec<u8>;
}

impl Pem for Vec<u8> {
    fn pem(&self) -> Vec<u8> {
        let text = std::str::from_utf8(self).expect("text");
        let block: String = text.lines().filter(|line| !line.starts_with('-')).collect();
        base64::engine::general_purpose::STANDARD.decode(block).expect("base64")
    }
}

impl Issuer {
    fn published(&self) -> Value {
        let mut jwk = Jwk::from_encoding_key(&self.key, self.algorithm).expect("a key");
        jwk.common.key_id = Some(self.kid.to_owned());
        serde_json::to_value(jwk).expect("JSON")
    }

    fn token(&self, claims: &Value) -> String {
        let header = Header { kid: Some(self.kid.to_owned()), ..Header::new(self.algorithm) };
        encode(&header, claims, &self.key).expect("encodes")
    }
}

fn claims() -> Value {
    json!({"sub": "user-1", "exp": NOW + 300, "aud": "sync", "iss": "idp"})
}

fn file(name: &str, document: &Value) -> PathBuf {
    let path = std::env::temp_dir().join(format!("tributary-{name}-{}.json", std::process::id()));
    std::fs::write(&path, document.to_string()).expect("is written");
    path
}

fn user(verifier: &JwtVerifier, token: &str) -> Result<String, AuthRequired> {
    let mut headers = HeaderMap::new();
    headers.insert("authorization", HeaderValue::from_str(&format!("Bearer {token}")).expect("a value"));
    let identity = Authenticator::Jwt(verifier.clone()).authenticate(&headers, NOW)?;
    Ok(identity.user.as_str().to_owned())
}

#[test]
fn published_keys_verify_and_rotate() {
    let issuers =
        [(Algorithm::RS256, "r"), (Algorithm::ES256, "e"), (Algorithm::EdDSA, "d")].map(|(a, k)| issuer(a, k));
    let all = json!({"keys": issuers.iter().map(Issuer::published).collect::<Vec<_>>()});
    let path = file("rotation", &all);
    let keys = KeyFile::open(path.clone()).expect("keys");
    let verifier = JwtVerifier::key_file(keys.clone()).with_audience("sync".to_owned()).with_issuer("idp".to_owned());
    for issuer in &issuers {
        assert_eq!(user(&verifier, &issuer.token(&claims())), Ok("user-1".to_owned()), "{:?}", issuer.algorithm);
        for (claim, other) in
            [("aud", json!("other")), ("iss", json!("other")), ("aud", json!(null)), ("exp", json!(NOW - 60))]
        {
            let mut wrong = claims();
            wrong[claim] = other;
            assert_eq!(user(&verifier, &issuer.token(&wrong)), Err(AuthRequired), "{claim}");
        }
        // Signed by somebody else under a published name.
        let token =
            Issuer { algorithm: issuer.algorithm, kid: issuer.kid, key: self::issuer(issuer.algorithm, "x").key };
        assert_eq!(user(&verifier, &token.token(&claims())), Err(AuthRequired));
    }
    let mut late = claims();
    late["exp"] = json!(NOW - 90);
    assert!(user(&verifier, &issuers[2].token(&late)).is_err());
    assert!(user(&verifier.clone().with_leeway(91), &issuers[2].token(&late)).is_ok());

    // A key that comes is taken and one that goes is not trusted any more.
    let next = issuer(Algorithm::ES256, "next");
    assert_eq!(user(&verifier, &next.token(&claims())), Err(AuthRequired));
    std::fs::write(&path, json!({"keys": [issuers[2].published(), next.published()]}).to_string()).expect("is written");
    keys.renew().expect("keys");
    assert!(user(&verifier, &next.token(&claims())).is_ok());
    assert!(user(&verifier, &issuers[2].token(&claims())).is_ok());
    assert_eq!(user(&verifier, &issuers[0].token(&claims())), Err(AuthRequired));

    // What gives no keys takes none away.
    for bad in ["", "{}", r#"{"keys": []}"#, r#"{"keys": 1}"#, &" ".repeat(MAX_OCTETS as usize + 1)] {
        std::fs::write(&path, bad).expect("is written");
        assert!(keys.renew().is_err());
        assert!(user(&verifier, &next.token(&claims())).is_ok());
    }
    std::fs::remove_file(&path).expect("is there");
    assert!(matches!(keys.renew(), Err(JwksError::Unreadable(_))));
    assert!(matches!(KeyFile::open(path), Err(JwksError::Unreadable(_))));
    assert!(user(&verifier, &next.token(&claims())).is_ok());
}

#[test]
fn a_public_key_is_no_secret_and_none_is_no_algorithm() {
    let rsa = issuer(Algorithm::RS256, "r");
    let published = rsa.published();
    let secret = json!({"kty": "oct", "kid": "s", "k": URL_SAFE_NO_PAD.encode([7; 32])});
    let path = file("confusion", &json!({"keys": [published, secret]}));
    let verifier = JwtVerifier::key_file(KeyFile::open(path.clone()).expect("keys"));
    let modulus = octets_of(published["n"].as_str().expect("a text")).expect("octets");
    let octets = published.to_string().into_bytes();
    for (kid, material) in [(Some("r"), &modulus[..]), (None, &modulus), (Some("r"), &octets), (Some("s"), &[7; 32])] {
        let header = Header { kid: kid.map(str::to_owned), ..Header::new(Algorithm::HS256) };
        let token =
            encode(&header, &claims(), &EncodingKey::from_secret(material).expect("a secret")).expect("encodes");
        assert_eq!(user(&verifier, &token), Err(AuthRequired), "{kid:?}");
    }
    let token = rsa.token(&claims());
    let payload = token.split('.').nth(1).expect("a payload");
    for header in [json!({"alg": "none"}), json!({"alg": "none", "kid": "r"}), json!({"alg": "None"})] {
        let header = URL_SAFE_NO_PAD.encode(header.to_string());
        assert_eq!(user(&verifier, &format!("{header}.{payload}.")), Err(AuthRequired));
    }
    // The key is for RS256 alone.
    for algorithm in [Algorithm::RS384, Algorithm::PS256] {
        let other = Issuer { algorithm, kid: "r", key: rsa.key.clone() };
        assert_eq!(user(&verifier, &other.token(&claims())), Err(AuthRequired), "{algorithm:?}");
    }
    std::fs::remove_file(path).expect("is there");
}

#[test]
fn keys_of_other_kinds_and_uses_are_left_out() {
    let good = issuer(Algorithm::EdDSA, "d").published();
    let with = |member: &str, value: Value| {
        let mut key = good.clone();
        key[member] = value;
        key
    };
    for left_out in [
        with("use", json!("enc")),
        with("key_ops", json!(["sign"])),
        with("alg", json!("RS256")),
        with("crv", json!("Ed448")),
        with("x", json!("AAAA")),
        with("kty", json!("other")),
        json!({"kty": "RSA", "n": URL_SAFE_NO_PAD.encode([255; 128]), "e": "AQAB"}),
        json!({"kty": "RSA", "n": URL_SAFE_NO_PAD.encode([255; 1025]), "e": "AQAB"}),
        json!(1),
    ] {
        assert!(
            matches!(parse(json!({"keys": [left_out]}).to_string().as_bytes()), Err(JwksError::NoKey)),
            "{left_out}"
        );
        assert_eq!(parse(json!({"keys": [left_out, good]}).to_string().as_bytes()).expect("a key").len(), 1);
    }
    for kept in [with("use", json!("sig")), with("key_ops", json!(["verify"]))] {
        assert_eq!(parse(json!({"keys": [kept]}).to_string().as_bytes()).expect("a key").len(), 1);
    }
    let many = json!({"keys": vec![good; MAX_KEYS + 1]}).to_string();
    assert!(matches!(parse(many.as_bytes()), Err(JwksError::TooManyKeys)));
}
