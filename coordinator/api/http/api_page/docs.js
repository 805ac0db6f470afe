// Swagger UI over this server's own description.
SwaggerUIBundle({ url: "/openapi.json", dom_id: "#api", deepLinking: true });
