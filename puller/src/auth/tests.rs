//! Which requests have an identity.

use jsonwebtoken::{EncodingKey, Header, encode};

use super::*;

const SECRET: &[u8] = &[7; 32];
const NOW: i64 = 1_800_000_000;

fn claims() -> Value {
    json!({"sub": "user-1", "exp": NOW + 300, "role": "editor"})
}

fn signed(algorithm: Algorithm, secret: &[u8], claims: &Value) -> String {
    let key = EncodingKey::from_secret(secret).expect("a secret");
    encode(&Header::new(algorithm), claims, &key).expect("encodes")
}

fn with_claim(name: &str, value: Value) -> Value {
    let mut claims = claims();
    claims[name] = value;
    claims
}

fn without_claim(name: &str) -> Value {
    let mut claims = claims();
    claims.as_object_mut().expect("an object").remove(name);
    claims
}

fn headers(values: &[(&'static str, &str)]) -> HeaderMap {
    let pair = |(name, value): &(&'static str, &str)| {
        (HeaderName::from_static(name), HeaderValue::from_bytes(value.as_bytes()).expect("a value"))
    };
    values.iter().fold(HeaderMap::new(), |mut all, value| {
        let (name, value) = pair(value);
        all.append(name, value);
        all
    })
}

fn verifier() -> JwtVerifier {
    JwtVerifier::hs256([SECRET]).expect("long enough")
}

fn authenticate(verifier: JwtVerifier, token: &str) -> Result<Identity, AuthRequired> {
    Authenticator::Jwt(verifier).authenticate(&headers(&[("authorization", &format!("Bearer {token}"))]), NOW)
}

fn presented(claims: &Value) -> Result<Identity, AuthRequired> {
    authenticate(verifier(), &signed(Algorithm::HS256, SECRET, claims))
}

#[test]
fn the_subject_is_the_user() {
    let identity = presented(&claims()).expect("authentic");
    assert_eq!(identity.user.as_str(), "user-1");
    assert_eq!(identity.claims, claims());
    assert_eq!(format!("{identity:?}"), "Identity { user: UserId(6 octets), .. }");
}

#[test]
fn a_subject_is_a_nonempty_text() {
    for sub in [json!(""), json!(null), json!(1), json!(["user-1"]), json!("a\0b")] {
        assert_eq!(presented(&with_claim("sub", sub)), Err(AuthRequired));
    }
    assert_eq!(presented(&without_claim("sub")), Err(AuthRequired));
    assert_eq!(presented(&json!("user-1")), Err(AuthRequired));
}

#[test]
fn times_are_heeded_with_a_minute_of_leeway() {
    for (exp, valid) in [(NOW - 59, true), (NOW - 60, false), (0, false), (-1, false)] {
        assert_eq!(presented(&with_claim("exp", json!(exp))).is_ok(), valid, "exp {exp}");
    }
    for exp in [json!("1900000000"), json!(null), json!([])] {
        assert_eq!(presented(&with_claim("exp", exp)), Err(AuthRequired));
    }
    assert_eq!(presented(&without_claim("exp")), Err(AuthRequired));
    for (nbf, valid) in [(NOW + 60, true), (NOW + 61, false)] {
        assert_eq!(presented(&with_claim("nbf", json!(nbf))).is_ok(), valid, "nbf {nbf}");
    }
    assert_eq!(presented(&with_claim("nbf", json!("soon"))), Err(AuthRequired));
}

#[test]
fn other_algorithms_and_keys_are_refused() {
    let none = "eyJhbGciOiJub25lIiwidHlwIjoiSldUIn0"; // {"alg":"none","typ":"JWT"}
    let token = signed(Algorithm::HS256, SECRET, &claims());
    let [header, payload, signature] = token.split('.').collect::<Vec<_>>()[..] else { panic!("three parts") };
    for forged in [
        format!("{none}.{payload}."),
        format!("{none}.{payload}.{signature}"),
        format!("{header}.{payload}."),
        format!("{header}.{payload}"),
        format!("{header}.{payload}.{signature}."),
        format!("{header}.{payload}.{}", &signature[1..]),
        format!("{header}.{payload}.{signature}="),
        String::new(),
        "..".to_owned(),
        "x".repeat(MAX_TOKEN_OCTETS + 1),
        signed(Algorithm::HS384, SECRET, &claims()),
        signed(Algorithm::HS512, SECRET, &claims()),
        signed(Algorithm::HS256, &[8; 32], &claims()),
    ] {
        assert_eq!(authenticate(verifier(), &forged), Err(AuthRequired), "{forged}");
    }
    let critical = Header { crit: Some(vec!["b64".to_owned()]), ..Header::new(Algorithm::HS256) };
    let key = EncodingKey::from_secret(SECRET).expect("a secret");
    let token = encode(&critical, &claims(), &key).expect("encodes");
    assert_eq!(authenticate(verifier(), &token), Err(AuthRequired));
}

#[test]
fn secrets_rotate() {
    let both = JwtVerifier::hs256([[9_u8; 32].as_slice(), SECRET]).expect("long enough");
    for secret in [&[9; 32], SECRET] {
        assert!(authenticate(both.clone(), &signed(Algorithm::HS256, secret, &claims())).is_ok());
    }
    assert!(JwtVerifier::hs256([&SECRET[1..]]).is_err());
    assert!(JwtVerifier::hs256([]).is_err());
}

#[test]
fn audience_and_issuer_are_required_when_set() {
    let strict = verifier().with_audience("sync".to_owned()).with_issuer("idp".to_owned());
    let presented = |claims: &Value| authenticate(strict.clone(), &signed(Algorithm::HS256, SECRET, claims)).is_ok();
    let good = json!({"sub": "u", "exp": NOW, "aud": ["other", "sync"], "iss": "idp"});
    assert!(presented(&good));
    for (name, value) in [("aud", json!("other")), ("iss", json!("other")), ("aud", json!(null)), ("iss", json!(null))]
    {
        let mut claims = good.clone();
        claims[name] = value;
        assert!(!presented(&claims), "{name}");
    }
    assert!(!presented(&claims()));
    assert!(authenticate(verifier(), &signed(Algorithm::HS256, SECRET, &good)).is_ok());
}

#[test]
fn the_bearer_header_stands_once() {
    let token = signed(Algorithm::HS256, SECRET, &claims());
    let authenticate =
        |values: &[(&'static str, &str)]| Authenticator::Jwt(verifier()).authenticate(&headers(values), NOW).is_ok();
    let bearer = format!("Bearer {token}");
    assert!(authenticate(&[("authorization", &bearer)]));
    assert!(authenticate(&[("authorization", &format!("bearer  {token}"))]));
    assert!(!authenticate(&[]));
    assert!(!authenticate(&[("authorization", &bearer), ("authorization", &bearer)]));
    for other in
        [token.clone(), format!("Basic {token}"), format!("Bearer{token}"), "Bearer".to_owned(), "Bearer é".to_owned()]
    {
        assert!(!authenticate(&[("authorization", &other)]), "{other}");
    }
    // The trusted header means nothing unless it is switched on.
    assert!(!authenticate(&[("x-user", "user-1")]));
}

#[test]
fn a_trusted_header_names_the_user_when_switched_on() {
    let trusted = Authenticator::TrustedHeader(HeaderName::from_static("x-user"));
    let identity = trusted.authenticate(&headers(&[("x-user", "us\u{e9}r")]), NOW).expect("an identity");
    assert_eq!((identity.user.as_str(), identity.claims), ("us\u{e9}r", json!({"sub": "us\u{e9}r"})));
    for refused in [&[][..], &[("x-user", "")], &[("x-user", "a"), ("x-user", "b")], &[("x-user2", "a")]] {
        assert_eq!(trusted.authenticate(&headers(refused), NOW), Err(AuthRequired));
    }
    let token = format!("Bearer {}", signed(Algorithm::HS256, SECRET, &claims()));
    assert_eq!(trusted.authenticate(&headers(&[("authorization", &token)]), NOW), Err(AuthRequired));
    let mut latin1 = HeaderMap::new();
    latin1.insert("x-user", HeaderValue::from_bytes(b"us\xe9r").expect("a value"));
    assert_eq!(trusted.authenticate(&latin1, NOW), Err(AuthRequired));
}
